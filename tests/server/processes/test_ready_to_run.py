"""`serve MODEL` as one types it: names of vLLM's flags, a template of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid import reference_model
from tests.server import test_named_models as named
from tests.server.running import ROOT, ServerProcess
from tests.thorough import thorough

COMMAND = ("-m", "megatron_hybrid.cli", "serve")
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_name_on_the_hub_is_served_with_vllms_flags_and_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in reference_model.path().iterdir()}
    monkeypatch.setattr(named, "FILES", files)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    flags = """--port 0 --max-model-len 2k --max-num-seqs 4 --root-path /llm""".split()
    flags += ["--served-model-name", named.NAME, "two", "--chat-template", str(template)]
    with named.small_hub() as url:
        variables = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
        for name, value in {**variables, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        with ServerProcess(*COMMAND, named.NAME, *flags, OMP_NUM_THREADS="1") as server:
            check_flags(server)
            assert f"{named.NAME} is read from {tmp_path}" in server.output


def check_flags(server: ServerProcess) -> None:
    cards = ask(server.url + "/v1/models")["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [
        (named.NAME, 2000),
        ("two", 2000),
    ]
    assert ask(server.url + "/llm/ping") == ask(server.url + "/health")
    tokens = ask(server.url + "/tokenize", CHAT)["tokens"]
    assert ask(server.url + "/detokenize", {"tokens": tokens})["prompt"].endswith("<<Hello>>")
    answer = ask(server.url + "/v1/chat/completions", {**CHAT, "model": "two", "max_tokens": 2})
    assert answer["model"] == named.NAME and answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["usage"]["completion_tokens"]
    assert server.output.count("--max-model-len sets --inference-max-seq-length: 2000") == 1
    flag = "--inference-dynamic-batching-max-requests"
    assert server.output.count(f"--max-num-seqs sets {flag}: 4") == 1


@thorough  # test_end_to_end.py: another sentence
def test_a_file_that_is_no_template_ends_the_start_in_a_sentence(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for")
    done = subprocess.run(
        [
            sys.executable,
            *COMMAND,
            str(reference_model.path()),
            "--port",
            "0",
            "--chat-template",
            str(template),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "is no chat template: line 1" in done.stderr and "Traceback" not in done.stderr
