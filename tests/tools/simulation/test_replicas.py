"""Simulated replicas: what is counted hangs together, and the tool runs from end to end."""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hybrid.cache.changes import Change
from simulation.replicas import COSTS, REFERENCE, Ask, Chats, Replicas
from simulation.routers import ROUTERS, CacheAware

TOOL = Path(__file__).parents[3] / "tools" / "simulate_replicas.py"
SMALL = Chats(
    requests=60, turns=3, systems=3, system_tokens=200, answer_tokens=4, clients=6, open_chats=12
)


class Watched(CacheAware):
    """Checks what a router may count on."""

    def __init__(self) -> None:
        super().__init__(REFERENCE)
        self.asks: list[Ask] = []
        self.open: set[str] = set()
        self.begun: set[str] = set()
        self.gone: set[int] = set()

    def place(self, ask: Ask, replicas: Sequence[int]) -> int:
        assert not self.gone & set(replicas)
        assert ask.name not in self.open and len(self.open) < SMALL.clients
        self.asks.append(ask)
        self.open.add(ask.name)
        return super().place(ask, replicas)

    def started(self, ask: Ask) -> None:
        assert ask.name in self.open - self.begun
        self.begun.add(ask.name)

    def ended(self, ask: Ask, *, is_whole: bool) -> None:
        assert not is_whole or ask.name in self.begun
        self.open.remove(ask.name)
        super().ended(ask, is_whole=is_whole)

    def changed(self, replica: int, changes: list[Change]) -> None:
        assert replica not in self.gone

    def lost(self, replica: int) -> None:
        self.gone.add(replica)
        super().lost(replica)


@pytest.mark.parametrize("kill", [False, True])
def test_every_request_is_answered_or_lost_with_its_replica(kill: bool) -> None:
    router = Watched()
    result = Replicas(SMALL, router, 3, kill=kill).run()
    assert not router.open and router.gone == ({2} if kill else set())
    assert result.requests == len(router.asks) == len(result.answers) + result.failed
    assert result.by_replica.total() == result.requests
    assert kill or (result.requests == SMALL.requests and not result.failed)
    assert 0 < result.skipped_tokens < result.prompt_tokens
    # Every prompt of a chat goes on from the one before it.
    chats: dict[int, list[Ask]] = {}
    for ask in router.asks:
        chats.setdefault(ask.chat.number, []).append(ask)
    for asks in chats.values():
        assert len(asks) <= SMALL.turns
        for before, after in zip(asks, asks[1:], strict=False):
            whole = [*before.prompt.tolist(), *before.answer.tolist()]
            assert after.prompt.tolist()[: len(whole)] == whole


def test_with_room_for_everything_only_what_is_new_is_computed() -> None:
    """One client at a time, so that nobody computes what another one is computing."""
    chats = replace(SMALL, clients=1)
    router = Watched()
    geometry = replace(REFERENCE, num_blocks=2_000, num_cached_slots=1_000)
    result = Replicas(chats, router, 1, geometry=geometry).run()
    later = sum(one.chat.replica is not None for one in router.asks)
    assert later == chats.requests
    new = (chats.turn_tokens + 1 + 4) * chats.requests  # and the template's
    firsts = chats.requests // chats.turns * 64  # what a system message has behind its last block
    most = new + firsts + chats.systems * (chats.system_tokens + 2 * 64) + chats.requests * 64
    assert result.prompt_tokens - result.skipped_tokens <= most


def test_a_run_depends_on_its_seed_alone() -> None:
    chats = replace(SMALL, spread=0.5, think=0.5)
    results = [Replicas(one, ROUTERS["longest_prefix"](REFERENCE, 2), costs=COSTS["busy"]).run()
               for one in (chats, chats, replace(chats, seed=1))]  # fmt: skip
    assert results[0] == results[1] != results[2]


def test_time_is_that_of_the_steps() -> None:
    chats = replace(SMALL, requests=1, turns=1, clients=1, open_chats=1)
    result = Replicas(chats, ROUTERS["load_balanced"](REFERENCE, 1), 1).run()
    costs = COSTS["cpu"]
    # Two steps: the first ends with the system message, where a state is kept.
    first = 2 * costs.step + result.prompt_tokens * costs.token
    assert result.first_tokens == pytest.approx([first])
    assert result.answers == pytest.approx([first + 3 * (costs.step + costs.token)])


def test_clients_that_come_in_bursts_ask_together() -> None:
    router = Watched()
    Replicas(replace(SMALL, think=2.0, bursts=True), router).run()
    sent = sorted({round(ask.sent, 6) for ask in router.asks})
    assert sent == [4.0 * number for number in range(len(sent))] and len(sent) >= 10


def test_the_tool_compares_routers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = "--requests 40 --clients 4 --open-chats 8 --seeds 0 1 --costs gpu --kill --json"
    monkeypatch.setattr(sys, "argv", [str(TOOL), *flags.split(), str(out)])
    monkeypatch.setattr(gc, "disable", lambda: None)  # it would hold for all tests to come
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 0
    rows = json.loads(out.read_text())
    assert [one["router"] for one in rows] == [*ROUTERS, "joint_memory"]
    assert rows[0]["points"] == 0 and rows[0]["answer"] == 1
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
