"""The AI SDK under node, where that is installed, as test_clients.py has Python's clients."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_clients import MODEL, run_client
from tests.server.running import ROOT, ServerProcess
from tests.thorough import EVERYTHING

pytestmark = [
    pytest.mark.skipif(not EVERYTHING, reason="installs clients: TESTS=all"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="node is not installed"),
]

SOURCES = Path(__file__).parent / "node"
PACKAGES = ROOT / ".venv-clients" / "node"
INSTALL_SECONDS = 250


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("tools/run_text_generation_server.py", "--port", "0") as server:
        yield server.url


def test_the_ai_sdk_does_what_its_script_asks(url: str) -> None:
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for source in SOURCES.iterdir():
        shutil.copy(source, PACKAGES)
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline"]
    subprocess.run(install, cwd=PACKAGES, timeout=INSTALL_SECONDS, check=True)
    print(run_client(["node", "use_ai_sdk.mjs", f"{url}/v1", MODEL], PACKAGES))
