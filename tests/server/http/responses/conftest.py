from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop
from tests.server.http.responses.responding import Serve, Server
from tests.server.scripted_engine import ScriptedEngine
from tests.text.chat_templates import with_template


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Iterator[Serve]:
    """Makes a server with this chat template, whose model says these texts."""
    running: list[RunningLoop] = []

    def start(template: str, *texts: str, **options: Any) -> Server:
        tokenizer = with_template(template)
        engine = ScriptedEngine(tokenizer, *texts)
        running.append(RunningLoop(engine, tmp_path_factory.mktemp("s")))
        folder = str(tokenizer_folder)
        made = ServerOptions(tokenizer_folder=folder, model_name="fake", **options)
        app = create_app(running[-1].serve(tokenizer, made))
        return Server(app.test_client(), engine, tokenizer)

    yield start
    for one in running:
        one.close()
