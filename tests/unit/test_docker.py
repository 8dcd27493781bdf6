"""The images' files agree with one another, with our command line, and with the repository."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from bench.ports import free_port
from megatron_hybrid.commands import COMMANDS
from megatron_hybrid.server.options import ServerOptions
from tests.server.running import http_server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "docker"
DASHBOARD = "/var/lib/grafana/dashboards"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: the word that each begins with, and the rest of its line or lines."""
    text = (FOLDER / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def of_kind(word: str) -> list[str]:
    return [rest for kind, rest in instructions() if kind == word]


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


def serves(flags: list[str]) -> Any:
    """What serve makes of these; a flag that is none would end this."""
    assert flags[0] == "serve"
    return COMMANDS["serve"].argument_parser().parse_args(flags[1:])


def with_defaults(text: str) -> str:
    """As with an environment that sets nothing."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_images_are_begun_from_versions() -> None:
    images = [rest.split()[0] for rest in of_kind("FROM")]
    images += [one["image"] for one in compose()["services"].values()]
    others = [image for image in images if "${DEVICE}" not in image and "megatron-" not in image]
    assert len(others) == 4
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in others)


def test_every_device_has_a_base_and_its_requirements() -> None:
    bases = {rest.split()[-1] for rest in of_kind("FROM")}
    files = {path.name for path in FOLDER.glob("requirements-*.txt")}
    assert {"cpu-base", "cuda-base"} <= bases
    assert files == {"requirements-cpu.txt", "requirements-cuda.txt"}
    overlay = compose("docker-compose.cuda.yml")["services"]["server"]["build"]["args"]
    assert {compose()["services"]["server"]["build"]["args"]["DEVICE"], overlay["DEVICE"]} == {
        "cpu",
        "cuda",
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_versions_of_an_image_are_those_that_the_package_takes(device: str) -> None:
    setup = (ROOT / "setup.py").read_text()
    lines = (FOLDER / f"requirements-{device}.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if "==" in line]
    assert {"torch", "transformers"} <= {one.name for one in pinned}
    for one in pinned:
        (version,) = one.specifier
        for wanted in re.findall(rf"[\"'\s](({one.name})>=[^\"';]+)", setup):
            assert version.version in Requirement(wanted[0]).specifier


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert ignored[1] == "*"
    copied = [rest.split()[:-1] for rest in of_kind("COPY") if not rest.startswith("--from")]
    for name in sum(copied, []):
        for path in {name.replace("${DEVICE}", device) for device in ("cpu", "cuda")}:
            assert (ROOT / path).exists()
            assert any(fnmatch(path, pattern) for pattern in sent)
    assert all(list(ROOT.glob(pattern)) for pattern in sent)


def test_arguments_that_compose_gives_are_those_of_the_dockerfile() -> None:
    known = {rest.partition("=")[0] for rest in of_kind("ARG")}
    assert compose()["services"]["server"]["build"]["args"].keys() <= known


def test_the_image_runs_our_command_as_nobody_special() -> None:
    (entry,), (flags,) = of_kind("ENTRYPOINT"), of_kind("CMD")
    assert json.loads(entry) == ["megatron-hybrid"]
    assert serves(json.loads(flags)).host == "0.0.0.0"
    (user,) = of_kind("USER")
    assert int(user) > 0 and f"--uid {user} " in " ".join(of_kind("RUN"))
    assert of_kind("STOPSIGNAL") == ["SIGTERM"]
    assert of_kind("EXPOSE") == [str(ServerOptions.port)]


def test_no_secret_is_in_an_image() -> None:
    said = " ".join(of_kind("ENV") + of_kind("ARG"))
    assert not re.search(r"KEY|TOKEN|PASSWORD|SECRET", said)


@pytest.mark.parametrize("status, healthy", [(200, True), (503, False), (None, False)])
def test_the_health_check_asks_health(status: int | None, healthy: bool) -> None:
    (check,) = of_kind("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"] and f"'127.0.0.1', {ServerOptions.port}," in command[2]
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as address:
        port = free_port() if status is None else address.rpartition(":")[2]
        code = command[2].replace(str(ServerOptions.port), str(port))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode == 0) is healthy
    assert asked == ([] if status is None else ["/health"])


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    subprocess.run(["hadolint", FOLDER / "Dockerfile"], check=True)


def test_the_services_command_is_one_of_ours() -> None:
    server = compose()["services"]["server"]
    flags = serves(shlex.split(with_defaults(server["command"])))
    assert flags.host == "0.0.0.0" and not hasattr(flags, "port")
    seconds = int(server["stop_grace_period"].removesuffix("s"))
    assert seconds > ServerOptions.shutdown_timeout


def test_services_are_for_this_machine_alone_and_keep_no_secret() -> None:
    for name, service in compose()["services"].items():
        ports = [with_defaults(port) for port in service["ports"]]
        assert all(port.startswith("127.0.0.1:") for port in ports), name
        environment = service.get("environment", {})
        if isinstance(environment, list):  # names alone: handed on from outside
            assert not any("=" in one for one in environment)
        else:
            assert not any(re.search("PASSWORD|SECRET|TOKEN", one) for one in environment)


def test_everything_that_is_mounted_exists() -> None:
    volumes = compose()["volumes"].keys()
    for service in compose()["services"].values():
        for mount in service["volumes"]:
            source = with_defaults(mount).split(":")[0]
            assert (FOLDER / source).is_file() if "/" in source else source in volumes, mount
    build = compose()["services"]["server"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_prometheus_asks_the_server_and_grafana_asks_prometheus() -> None:
    services = compose()["services"]
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{ServerOptions.port}"]}]
    assert "metrics_path" not in job  # Prometheus's own is ours: /metrics
    sources = yaml.safe_load((FOLDER / "grafana" / "datasources.yml").read_text())
    (source,) = sources["datasources"]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    assert {"server", "prometheus", "grafana"} == services.keys()


def test_grafana_finds_the_dashboard_where_it_looks() -> None:
    grafana = compose()["services"]["grafana"]
    file = f"{DASHBOARD}/grafana-dashboard.json"
    assert f"../grafana-dashboard.json:{file}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == file
    providers = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())
    assert [one["options"]["path"] for one in providers["providers"]] == [DASHBOARD]
    places = [volume.split(":")[1] for volume in grafana["volumes"]]
    for kind in ("datasources", "dashboards"):
        assert f"/etc/grafana/provisioning/{kind}/{kind}.yml" in places


def test_the_page_has_the_arguments_and_variables() -> None:
    page = (ROOT / "docs" / "docker.md").read_text()
    text = "".join(path.read_text() for path in FOLDER.glob("docker-compose*.yml"))
    names = {rest.partition("=")[0] for rest in of_kind("ARG")}
    names |= set(re.findall(r"\$\{(\w+)", text)) | set(
        compose()["services"]["server"]["environment"]
    )
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
