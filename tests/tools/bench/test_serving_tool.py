"""tools/benchmark_serving.py as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serving_arguments import parse_serving_arguments
from bench.serving_report import recorded_command
from tests.server.running import ServerProcess
from tests.text.make_tokenizers import byte_level, save
from tests.tools.bench.scripted_server import ScriptedServer, answer_events

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--random-input-len", "8", "--random-output-len", "3", "--num-prompts", "6"]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location(
        "benchmark_serving", ROOT / "tools" / "benchmark_serving.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer().in_thread() as running:
        yield running


def test_a_run_ends_with_a_table_and_a_file(
    main: Callable[[list[str]], int],
    server: ScriptedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SMALL, "--base-url", server.url, "--vocab-size", "512", "--request-rate", "100"]
    flags += ["--goodput", "ttft:5000", "e2el:9000", "--metric-percentiles", "50,99"]
    flags += ["--num-warmups", "2", "--api-key", "secret", "--metadata", "gpu=none"]
    flags += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    flags += ["--plot", str(tmp_path / "p.png")]
    assert main(flags) == 0
    table = capsys.readouterr().out
    for words in ("Serving Benchmark Result", "Cached input tokens:", "24", "P99 ITL (ms):"):
        assert words in table
    result = json.loads((tmp_path / "r.json").read_text())
    vllms = (
        "date backend label model_id tokenizer_id num_prompts request_rate burstiness "
        "max_concurrency duration completed failed total_input_tokens total_output_tokens "
        "request_throughput request_goodput output_throughput total_token_throughput "
        "max_output_tokens_per_s max_concurrent_requests"
    ).split()
    vllms += [
        f"{statistic}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p50", "p99")
    ]
    assert not set(vllms) - result.keys()
    assert (result["completed"], result["total_input_tokens"]) == (6, 48)
    assert (result["total_cached_tokens"], result["total_output_tokens"]) == (24, 18)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert (result["gpu"], result["model_id"]) == ("none", "scripted")
    assert "megatron-hybrid" in result["versions"] or "python" in result["versions"]
    assert "--request-rate 100" in result["command"] and "secret" not in json.dumps(result)
    assert "Authorization: Bearer secret\r\n" in server.headers[0]
    assert len(server.bodies) == 8 and all(body["ignore_eos"] for body in server.bodies)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_request_is_an_exit_code_of_1(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = 0

    def script(body: dict[str, Any]) -> Any:
        nonlocal answered
        answered += 1
        if answered == 3:
            return (429, {"error": {"message": "the queue is full"}})
        return answer_events(body, chat=False)

    with ScriptedServer(script).in_thread() as server:
        flags = [*SMALL, "--base-url", server.url, "--vocab-size", "512", "--save-detailed"]
        flags += ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
        assert main(flags) == 1
    assert "the queue is full" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["failures"] == {"HTTP 429": {"count": 1, "first": "the queue is full"}}
    assert result["errors"].count("") == 5 and len(result["itls"]) == 6


def test_a_server_that_is_not_there_is_an_exit_code_of_2(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer().in_thread() as server:
        url = server.url
    assert main(["--base-url", url, "--vocab-size", "512"]) == 2
    assert url in capsys.readouterr().err


def test_workloads_are_those_of_the_offline_benchmark(
    main: Callable[[list[str]], int], server: ScriptedServer, tmp_path: Path
) -> None:
    from bench.workloads import make_workload

    flags = ["--base-url", server.url, "--vocab-size", "512", "--scale", "0.002", "--save-result"]
    flags += ["--workload", "unique,multi_turn", "--result-filename", str(tmp_path / "w.json")]
    assert main(flags) == 0
    unique, multi_turn = json.loads((tmp_path / "w.json").read_text())["results"]
    assert unique["digest"] == make_workload("unique", 512, scale=0.002).digest()
    assert multi_turn["answer_token_ids_from"] == "return_token_ids"
    for key in ("wall_s", "output_tok_s", "computed_tokens", "ttft_s", "itl_ms", "mean_ttft_ms"):
        assert key in unique


def test_conversations(main: Callable[[list[str]], int], server: ScriptedServer) -> None:
    flags = ["--base-url", server.url, "--dataset-name", "multi_turn", "--num-clients", "3"]
    flags += ["--limit-max-tokens", "2", "--max-turns", "4", "--no-early-stop", "--warmup-step"]
    assert main(flags) == 0
    assert len(server.bodies) == 24 + 48


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--goodput", "ttft"], "--goodput"),
        (["--workload", "unique", "--dataset-name", "random"], "exclude"),
        (["--workload", "none"], "none"),
        (["--workload", "unique", "--top-p", "0.5"], "--top-p"),
        (["--workload", "unique", "--backend", "openai-chat"], "openai-chat"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--header", "nothing"], "KEY=VALUE"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--request-rate", "0"], "--request-rate"),
    ],
)
def test_bad_flags_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_serving_arguments(flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_keys_are_not_recorded() -> None:
    command = ["b.py", "--api-key", "k1", "--header", "X=k2", "Y=k3", "--seed", "1"]
    shown = recorded_command([*command, "--api-key=k4", "--header=Z=k5"])
    assert not any(key in shown for key in ("k1", "k2", "k3", "k4", "k5"))
    assert "--seed 1" in shown and "X=" in shown and "Z=" in shown


def test_the_client_needs_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']; sys.path.insert(0, 'tools')\n"
        "try: runpy.run_path('tools/benchmark_serving.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_our_own_server_is_measured(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its two real processes around an engine that repeats the prompt; `~` makes it fail."""
    folder = save(byte_level(), tmp_path / "tokenizer")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"prompt {i} " * 3}) for i in range(8)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "16"]
    flags += ["--custom-output-len", "5", "--max-concurrency", "4", "--save-result"]
    flags += ["--ignore-eos", "--temperature", "0", "--result-filename", str(tmp_path / "r.json")]
    with ServerProcess("-m", "tests.server.fake_server", "--tokenizer", str(folder)) as running:
        for backend in ("openai", "openai-chat"):
            assert main([*flags, "--base-url", running.url, "--backend", backend]) == 0
            result = json.loads((tmp_path / "r.json").read_text())
            assert (result["completed"], result["total_output_tokens"]) == (16, 80)
            assert result["total_cached_tokens"] > 0 and result["max_concurrent_requests"] <= 4
        workload = ["--workload", "multi_turn", "--scale", "0.002", "--vocab-size", "90"]
        flags_of_workload = ["--base-url", running.url, "--save-result", *workload]
        assert main([*flags_of_workload, "--result-filename", str(tmp_path / "w.json")]) == 0
        (multi_turn,) = json.loads((tmp_path / "w.json").read_text())["results"]
        assert multi_turn["answer_token_ids_from"] == "return_token_ids"
        prompts.write_text('{"prompt": "~"}')
        assert main([*flags, "--base-url", running.url]) == 1
    assert "asked to fail" in capsys.readouterr().out
