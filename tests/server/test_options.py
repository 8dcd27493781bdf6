"""The server's settings: flags, and the same in a file of options beside the engine's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from megatron_hybrid.arguments import ArgumentParser, values_from_args
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import RankLayout
from megatron_hybrid.server import cli
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import FrontEndSettings, LaunchOptions, ServerOptions
from megatron_hybrid.settings import options_of

KINDS = (EngineConfig, ServerOptions, LaunchOptions)
ARGUMENTS = (cli.add_engine_arguments, cli.add_server_arguments)
FILE: dict[str, Any] = {
    "seed": 7,
    "port": 0,
    "max-queue": 9,
    "http_workers": 2,
    "trusted_proxies": ["10.1.2.3/8", "fd00::1"],
    "log_format": "json",
    "access_log": False,
    "ignore_unknown_fields": True,
    "request_timeout": 2.5,
    "enable_control_routes": True,
    "allowed_origins": "https://chat.example",
    "served_model_name": ["mine", "yours", "mine"],
    "api_key": ["first", "second"],
    "admin_api_key": "third",
    "inference_rank_timeout": 5,
    "kv_events_config": {"enable_kv_cache_events": True, "topic": "t"},
}
FLAGS = """--seed 7 --port 0 --max-queue 9 --http-workers 2 --trusted-proxies 10.1.2.3/8 fd00::1
    --log-format json --no-access-log --ignore-unknown-fields --request-timeout 2.5
    --enable-control-routes --allowed-origins https://chat.example
    --api-key first --api-key second --admin-api-key third --inference-rank-timeout 5
    --served-model-name mine yours mine""".split()


def parsed(*flags: str) -> tuple[EngineConfig, ServerOptions, LaunchOptions]:
    """What a launch with these flags takes them for."""
    parser = ArgumentParser()
    for add in ARGUMENTS:
        add(parser)
    engine, server, launched = values_from_args(parser.parse_args(flags), *KINDS)
    config, launch = EngineConfig(**engine), cli.launch_options(launched)
    layout = RankLayout.from_environment(config.parallel_sizes)
    return config, cli.server_options(config, server, launch, layout), launch


def written(folder: Path, **values: Any) -> str:
    path = folder / "options.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    events = json.dumps(FILE["kv_events_config"])
    by_flags = parsed(*FLAGS, "--kv-events-config", events)
    assert parsed("--config", written(tmp_path, **FILE)) == by_flags
    _, options, launch = by_flags
    assert (options.port, options.http_workers, options.access_log) == (0, 2, False)
    assert [key.key for key in options.api_keys] == ["first", "second", "third"]
    assert options.trusted_proxies == ("10.1.2.3/8", "fd00::1")
    assert (options.model_names, launch.inference_rank_timeout) == (("mine", "yours"), 5)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, **FILE)
    _, options, launch = parsed(
        "--config", path, "--access-log", "--max-queue=3", "--no-enable-control-routes",
        "--api-key=other", "--no-ignore-unknown-fields",
    )  # fmt: skip
    assert (options.access_log, options.max_queue, options.port) == (True, 3, 0)
    assert not options.enable_control_routes and not options.ignore_unknown_fields
    assert launch.api_key == ("other",)


def test_files_that_a_file_names_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sesame\n")
    _, options, _ = parsed("--config", written(tmp_path, api_key_file="keys"))
    assert options.api_keys == (ApiKey("sesame", "alice"),)
    with pytest.raises(ConfigurationError, match=re.escape(f"{tmp_path}/c.pem (--ssl-certfile)")):
        parsed("--config", written(tmp_path, ssl_certfile="c.pem"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prot": 1}, "sets 'prot', which is not an option"),
        ({"model_name": "x"}, "sets 'model_name', which is not an option"),
        ({"port": 70000}, "--port is 70000; it must be at most 65535."),
        ({"port": "x"}, "--port is 'x'; it must be of type int."),
        ({"max_queue": 0}, "--max-queue is 0; it must be at least 1."),
        ({"http_connections_per_address": -1}, "it must be 0 (any number) or more."),
        ({"request_timeout": float("nan")}, "--request-timeout is nan; it must be a finite number"),
        ({"shutdown_timeout": 86401}, "--shutdown-timeout is 86401; it must be at most 86400."),
        (
            {"otlp_traces_endpoint": "x:1"},
            "is 'x:1'; it must be a URL such as http://localhost:4317",
        ),
        ({"log_format": "xml"}, "--log-format is 'xml'; it must be one of text, json."),
        ({"access_log": "no"}, "--access-log is 'no'; it must be of type bool."),
        ({"trusted_proxies": ["proxy.example"]}, "proxy.example is not an address, nor a network"),
        ({"allowed_hosts": [["x"]]}, "--allowed-hosts must be text, or a list of texts."),
        ({"data_parallel_size": 0}, "--data-parallel-size is 0; it must be at least 1."),
        ({"data_parallel_rank": 3, "data_parallel_size": 2}, "but --data-parallel-size is 2."),
        ({"kv_events_config": {"topics": "t"}}, "Object contains unknown field `topics`"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], words: str
) -> None:
    assert cli.main(["--config", written(tmp_path, **values)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_keys_are_not_shown_where_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parsed("--config", written(tmp_path, api_key=[12345, "sesame"]))
    assert "12345" not in str(refused.value) and "sesame" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="--api-key must be of type tuple"):
        parsed("--config", written(tmp_path, api_key=12345))
    assert "sesame" not in repr(parsed("--api-key", "sesame"))


def names(kinds: Iterable[type[Any]]) -> list[str]:
    return [option.name for kind in kinds for option in options_of(kind)]


def test_every_setting_stands_once_and_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    found = names(KINDS)
    assert len(found) == len(set(found))
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out
    for name in found:
        assert f"--{name.replace('_', '-')}" in listed


def test_a_front_end_reads_the_settings_that_it_is_given() -> None:
    _, options, _ = parsed(*FLAGS)
    settings = FrontEndSettings(options, "/folder", "digest")
    read = msgspec.json.decode(msgspec.json.encode(settings), type=FrontEndSettings)
    assert read == settings and read.options.api_keys == options.api_keys
