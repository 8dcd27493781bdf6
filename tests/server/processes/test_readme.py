"""What the pages tell users to type works as it stands there, against the model that ships."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_hybrid import reference_model
from tests.server.running import ROOT, ServerProcess

TOOL = "tools/run_text_generation_server.py"
PAGES = ("server.md", "responses.md")
ADDRESS = "http://127.0.0.1:5000"  # on the pages; ours has another port


def blocks(language: str, word: str) -> list[str]:
    """The pages' blocks of code in this language in which the word stands."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in PAGES)]
    found = [
        block
        for page in pages
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    return [block for block in found if word in block]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(TOOL, "--port", "0", OMP_NUM_THREADS="1") as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", blocks("bash", "curl "))
def test_curl_commands_are_answered(server: ServerProcess, block: str, tmp_path: Path) -> None:
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    script = block.replace(ADDRESS, server.url).replace("DIR", str(reference_model.path()))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        env={**os.environ, "CURL_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "json_schema" in block:
        content = json.loads(done.stdout)["choices"][0]["message"]["content"]
        assert json.loads(content) == {"code": 7315}
    elif "chat/completions" in block:
        assert "7315" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    elif "stream" in block:
        assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("block", blocks("python", "openai"))
def test_the_openai_client_is_answered(server: ServerProcess, block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.replace(ADDRESS, server.url)],
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Pixel" in done.stdout
