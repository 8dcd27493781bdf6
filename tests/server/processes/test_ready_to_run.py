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

COMMAND = ("-m", "megatron_hybrid.cli", "serve", str(reference_model.path()))
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_model_is_served_with_vllms_flags_and_a_template(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    flags = """--port 0 --max-model-len 2k --max-num-seqs 4 --served-model-name one two
        --root-path /llm""".split()
    with ServerProcess(
        *COMMAND, *flags, "--chat-template", str(template), OMP_NUM_THREADS="1"
    ) as server:
        cards = ask(server.url + "/v1/models")["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [
            ("one", 2000),
            ("two", 2000),
        ]
        assert ask(server.url + "/llm/ping") == ask(server.url + "/health")
        tokens = ask(server.url + "/tokenize", CHAT)["tokens"]
        assert ask(server.url + "/detokenize", {"tokens": tokens})["prompt"].endswith("<<Hello>>")
        answer = ask(server.url + "/v1/chat/completions", {**CHAT, "model": "two", "max_tokens": 2})
        assert answer["model"] == "one" and answer["usage"]["prompt_tokens"] == len(tokens)
        assert server.output.count("--max-model-len sets --inference-max-seq-length: 2000") == 1
        flag = "--inference-dynamic-batching-max-requests"
        assert server.output.count(f"--max-num-seqs sets {flag}: 4") == 1


def test_a_name_on_the_hub_is_downloaded_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in reference_model.path().iterdir()}
    monkeypatch.setattr(named, "FILES", files)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    with named.small_hub() as url:
        command = ("-m", "megatron_hybrid.cli", "serve", named.NAME, "--port", "0")
        variables = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
        for name, value in {**variables, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        with ServerProcess(*command, OMP_NUM_THREADS="1") as server:
            assert ask(server.url + "/v1/models")["data"][0]["id"] == named.NAME
            body = {**CHAT, "model": named.NAME, "max_tokens": 2}
            answer = ask(server.url + "/v1/chat/completions", body)
            assert answer["usage"]["completion_tokens"]
            assert f"{named.NAME} is read from {tmp_path}" in server.output


@thorough  # test_end_to_end.py: another sentence
def test_a_file_that_is_no_template_ends_the_start_in_a_sentence(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for")
    done = subprocess.run(
        [sys.executable, *COMMAND, "--port", "0", "--chat-template", str(template)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "is no chat template: line 1" in done.stderr and "Traceback" not in done.stderr
