"""What two engines skip behind the placer, against one engine with the memory of both."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bench.replicas import Workload, kill_midway
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.kv_events.messages import events_of
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.replica import PromptKeys
from tests.thorough import thorough

CHATS, TURNS, OPEN_CHATS, RUNNING = 16, 4, 10, 4
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 40, 20, 6
BLOCK = 16


def make_engine(share: float) -> DynamicInferenceEngine:
    """With so many times the memory of one replica: about 60 cached states."""
    return build_engine(
        EngineConfig(
            inference_dynamic_batching_block_size=BLOCK,
            inference_dynamic_batching_buffer_size_gb=0.02 * share,
            inference_dynamic_batching_max_requests=RUNNING,
            inference_dynamic_batching_prefix_caching_mamba_gb=0.04 * share,
            inference_logging_step_interval=0,
        )
    )


@dataclass
class Chat:
    """A chat whose next prompt is all of `tokens`."""

    name: str
    tokens: list[int]
    turns: int = 0
    replica: int = 0


@dataclass
class Run:
    """Chats, some of them open at the same time, that take turns on engines."""

    engines: list[DynamicInferenceEngine]
    policy: str
    generator: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        geometry = self.engines[0].cache_geometry
        self.sizes = CacheSizes(
            geometry.block_size, geometry.smallest_reusable_prefix, geometry.stored_as
        )
        self.placer = Placer(self.policy, self.sizes)
        self.changes = [engine.cache_changes() for engine in self.engines]

    def chats(self) -> Iterator[Chat]:
        systems = [self.draw(SYSTEM_TOKENS) for _ in range(4)]
        for number in range(CHATS):
            system = self.generator.choice(systems)
            yield Chat(f"chat{number}", [*system, *self.draw(TURN_TOKENS)])

    def draw(self, count: int) -> list[int]:
        return [self.generator.randrange(10, 400) for _ in range(count)]

    def skipped(self) -> int:
        """Tokens that all engines together skip until every chat is over."""
        coming = self.chats()
        waiting = [next(coming) for _ in range(OPEN_CHATS)]
        running: dict[str, Chat] = {}
        while waiting or running:
            while waiting and len(running) < RUNNING:
                self.ask(chat := waiting.pop(0))
                running[chat.name] = chat
            for chat in self.step(running):
                del running[chat.name]
                if chat.turns < TURNS:
                    chat.tokens += self.draw(TURN_TOKENS)
                    waiting.append(chat)
                elif (new := next(coming, None)) is not None:
                    waiting.append(new)
        stats = [engine.stats() for engine in self.engines]
        assert sum(one["requests_finished"]["length"] for one in stats) == CHATS * TURNS
        return sum(one["skipped_tokens"] for one in stats)

    def ask(self, chat: Chat) -> None:
        tokens = array("i", chat.tokens).tobytes()
        prompt = PromptKeys(tokens, BLOCK, "", self.sizes.stored_as)
        replicas = list(range(len(self.engines)))
        chat.replica = self.placer.place(chat.name, [prompt], 1, ANSWER_TOKENS, replicas)
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self.engines[chat.replica].add_request(f"{chat.name}-0", chat.tokens, params)

    def step(self, running: dict[str, Chat]) -> list[Chat]:
        """One step of each engine; the chats that have their answers."""
        done = []
        for replica, engine in enumerate(self.engines):
            for event in engine.step() if engine.has_work() else []:
                chat = running[event.request_id.rpartition("-")[0]]
                self.placer.start(event.request_id)
                chat.tokens += event.token_ids
                if event.finish_reason is not None:
                    chat.turns += 1
                    self.placer.end(chat.name, ANSWER_TOKENS)
                    done.append(chat)
            self.placer.replicas[replica].contents.apply(events_of(self.changes[replica].take()))
        return done


@pytest.fixture(scope="module")
def joint() -> int:
    skipped = Run([make_engine(2.0)], "longest_prefix").skipped()
    assert skipped > 0
    return skipped


@thorough  # tests/tools/simulation
@pytest.mark.parametrize(
    "policy", ["longest_prefix", pytest.param("load_balanced", marks=thorough)]
)
def test_two_replicas_skip_nearly_what_one_with_their_memory_does(policy: str, joint: int) -> None:
    run = Run([make_engine(1.0), make_engine(1.0)], policy)
    skipped = run.skipped()
    assert all(engine.stats()["state_evictions"] for engine in run.engines)
    served = [engine.stats()["requests_admitted"] for engine in run.engines]
    assert min(served) > 0.25 * sum(served)
    if policy == "load_balanced":
        assert skipped < 0.9 * joint  # it looks at no cache: the chats' turns go anywhere
    else:
        assert skipped >= 0.9 * joint


@thorough  # test_replicas.py kills one of a model that is made up
def test_a_killed_replica_of_a_real_model_takes_only_its_own_requests_with_it() -> None:
    flags = ["--inference-dynamic-batching-buffer-size-gb", "0.05", "--device", "cpu"]
    workload = Workload(requests=30, turns=2, clients=6, open_chats=6, system_words=20)
    result = kill_midway(flags, workload)
    lost = sum(result["failures"].values())
    assert result["requests"] >= 15 + 6
    # Those that were open there, and what had been placed until the death was noticed.
    assert 0 <= lost <= 6
    assert result["answered_after"] >= result["requests"] - result["killed_after"] - 6
    assert list(result["by_replica"]) == ["0"]
