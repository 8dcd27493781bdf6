"""When nobody wants anything, the engine does what was left for later."""

from __future__ import annotations

from pathlib import Path

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

MANY = 100  # of which the loop would do two a second if it slept in between
MUCH = 10**9


class BusyEngine(FakeEngine):
    """Has things left to do."""

    left = MANY

    def use_idle_time(self) -> bool:
        assert not self.has_work()
        if not self.left:
            return False
        self.left -= 1
        return True


def test_an_idle_loop_does_one_after_the_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = BusyEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    running = RunningLoop(engine, tmp_path)
    wait_until(lambda: engine.left == 0, 20)
    wait_until(lambda: not running.loop._uses_idle_time)  # and waits for requests then
    running.close()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    engine = BusyEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    engine.left = MUCH
    return engine


def test_requests_come_first(http: FlaskClient, engine: BusyEngine) -> None:
    for _ in range(2):
        wait_until(lambda: engine.left < MUCH)
        body = {"temperature": 0, "max_tokens": 4, "prompt": "x!abcdefgh"}
        answer = http.post("/v1/completions", json=body)
        assert answer.get_json()["choices"][0]["text"] == "x!ab"
        engine.left = MUCH
