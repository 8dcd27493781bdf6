"""Other people's clients against one server with the reference model: they are answered, as they
come from the package index.

    TESTS=all tools/run_tests.sh tests/clients

Each runs in a process of its own, with the packages of .venv-clients, which is made the first time:
nothing else here needs a network. scripts/ has a file for each library.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid import reference_model
from tests.clients.environments import environment, run
from tests.server.running import ServerProcess
from tests.thorough import EVERYTHING

pytestmark = pytest.mark.skipif(not EVERYTHING, reason="installs clients: TESTS=all")

MODEL = "reference_model"
FOLDER = str(reference_model.path())
SCRIPTS = Path(__file__).parent / "scripts"
REQUESTS = 12
RUN_SECONDS = 240


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("tools/run_text_generation_server.py", "--port", "0") as server:
        yield server.url


def run_client(command: list[str], folder: Path, **variables: str) -> str:
    """A client's run in `folder`, which is its home, too. Nothing comes from a hub."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    # aiperf leaves its sockets behind, and a socket's path may not be long.
    with tempfile.TemporaryDirectory() as short:
        own = {
            "HOME": str(folder),
            "TMPDIR": short,
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody is there
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return run(command, {**kept, **own, **variables}, folder, RUN_SECONDS)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_library_does_what_its_script_asks(script: Path, url: str, tmp_path: Path) -> None:
    python = environment("libraries") / "python"
    print(run_client([str(python), str(script), f"{url}/v1", MODEL, FOLDER], tmp_path))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_counts_no_errors(route: str, url: str, tmp_path: Path) -> None:
    program = environment("guidellm") / "guidellm"
    report = tmp_path / "report.json"
    run_client(
        [
            *(str(program), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format={route}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={FOLDER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={report}"),
        ],
        tmp_path,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (16, 16), tokens


@pytest.mark.parametrize(("kind", "flags"), [("chat", ["--per-chunk-usage"]), ("completions", [])])
def test_aiperf_counts_no_errors(kind: str, flags: list[str], url: str, tmp_path: Path) -> None:
    program = environment("aiperf") / "aiperf"
    report = tmp_path / "report"
    run_client(
        [
            *(str(program), "profile", "--model", MODEL, "--url", url),
            *("--endpoint-type", kind, "--streaming", "--tokenizer", FOLDER),
            *("--use-server-token-count", *flags),
            *("--concurrency", "4", "--request-count", str(REQUESTS)),
            *("--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", "16"),
            *("--extra-inputs", "ignore_eos:true", "--ui-type", "simple", "--no-gpu-telemetry"),
            *("--output-artifact-dir", str(report)),
        ],
        tmp_path,
        HF_HUB_OFFLINE="",  # it would take no folder for a tokenizer
    )
    figures: dict[str, Any] = json.loads((report / "profile_export_aiperf.json").read_text())
    assert figures["is_complete"] and figures["error_summary"] == [], figures["error_summary"]
    assert figures["request_count"]["avg"] == REQUESTS
    assert figures["output_sequence_length"]["avg"] == 16, figures["output_sequence_length"]
