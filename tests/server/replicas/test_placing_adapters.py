"""Prompts with adapters go where their adapter has their prefix, and to nobody who lacks it."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.kv_events.messages import events_of
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.replica import PromptKeys, Replica
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.weight_transfer.requests import FromFolder
from tests.engine.symbolic import make_engine, random_tokens
from tests.server.fake_engine import FakeEngine
from tests.server.replicas.test_coordinator import BLOCK, SHARED, Server, answers_of
from tests.server.replicas.test_placer import hybrid_placer
from tests.server.running import wait_until


def prompt(tokens: Sequence[int], adapter: str = "", size: int = BLOCK) -> PromptKeys:
    return PromptKeys(array("i", tokens).tobytes(), size, "", adapter=adapter)


def test_what_is_foreseen_is_what_an_engine_skips() -> None:
    """Also after a name has other weights, and its first ones again; the symbolic runner takes
    their source for the digest."""
    engine = make_engine()
    changes = engine.cache_changes()
    geometry = engine.cache_geometry
    sizes = CacheSizes(geometry.block_size, geometry.smallest_reusable_prefix, geometry.stored_as)
    replica = Replica(sizes)
    tokens = random_tokens(3, 40)
    foreseen = []
    for number, (adapter, source) in enumerate(
        [("", ""), ("a", "first"), ("b", "first"), ("a", "second"), ("a", "first"), ("", "")]
    ):
        if source:
            engine.load_adapter(adapter, source)
        replica.contents.apply(events_of(changes.take()))
        replica.adapters = engine.adapter_keys
        data = array("i", tokens).tobytes()
        mine = PromptKeys(data, geometry.block_size, "", geometry.stored_as, adapter)
        foreseen.append(replica.reusable(mine))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        before = engine.stats()["skipped_tokens"]
        engine.add_request(f"r{number}", tokens, params, adapter=adapter)
        while engine.has_work():
            engine.step()
        assert foreseen[-1] == engine.stats()["skipped_tokens"] - before
    assert [bool(tokens) for tokens in foreseen] == [False] * 4 + [True] * 2


def test_prompts_that_wait_are_expected_by_those_of_their_adapter_alone() -> None:
    placer = hybrid_placer("longest_prefix")
    for number in range(3):
        placer.replicas[number].adapters = {"a": "a@1", "b": "b@1"}
    where = placer.place("one", [prompt(SHARED, "a")], 1, 4, [0, 1, 2])
    found = placer.replicas[where]
    reusable = [found.reusable(prompt([*SHARED, 1], adapter)) for adapter in ("a", "b", "")]
    assert reusable == [len(SHARED), 0, 0]
    # new weights under its name while it waits, and then it is over
    found.adapters = {"a": "a@2"}
    placer.start("one-0")
    assert not found.expected
    placer.lose(where)
    assert not found.adapters


@pytest.mark.parametrize("policy", ["first_prefix_block", "bounded_rendezvous"])
def test_the_first_block_has_its_adapter(policy: str) -> None:
    """Prompts that begin alike spread by their adapters."""
    chosen = set()
    for number in range(8):
        placer = Placer(policy, CacheSizes(BLOCK, BLOCK))
        own = [prompt(SHARED, f"adapter {number}")]
        chosen.add(placer.place("r", own, 1, 4, [0, 1, 2]))
    assert len(chosen) > 1


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = Server(Path(folder), tokenizer)
        yield server
        server.close()


@pytest.fixture
def http(server: Server, tokenizer: Tokenizer, options: ServerOptions) -> FlaskClient:
    return create_app(Serving(server.worker, tokenizer, options)).test_client()


def load(server: Server, name: str, folder: str, replicas: Sequence[int] = (0, 1)) -> None:
    """From a folder of that name."""
    for number in replicas:
        client = server.worker.clients[number]
        client.begin(wire.LoadAdapter, name, FromFolder(folder), None, True).result(10)


def wanted(tokens: list[int], *adapters: str) -> wire.Wanted:
    prompts = [wire.packed(tokens)] * max(1, len(adapters))
    return wire.Wanted("w", prompts, 1, 4, "", [*adapters])


def test_adapters_come_and_the_coordinator_knows_all_that_it_knew(server: Server) -> None:
    """What runs still counts, and what is cached is known; of the adapter by its weights."""
    placer = server.start_coordinator().placer
    server.replicas[1].has(SHARED)
    wait_until(lambda: len(placer.replicas[1].contents.blocks) == len(SHARED) // BLOCK)
    running = server.worker.place(wanted([1]))
    for folder in ("x", "y"):
        load(server, "a", folder)
        wait_until(lambda now=folder: placer.replicas[0].adapters == {"a": f"a@{now}"})
    assert answers_of(server.coordinator) == 1
    assert len(placer.replicas[1].contents.blocks) == len(SHARED) // BLOCK
    keys, _ = prompt(SHARED).of(0, "a@y")
    server.replicas[0].stores(keys, SHARED)
    wait_until(lambda: len(placer.replicas[0].contents.blocks) == len(SHARED) // BLOCK)
    for adapter, place in (("a", 0), ("", 1)):
        placement = server.worker.place(wanted([*SHARED, 1], *([adapter] if adapter else [])))
        assert placement.client is server.worker.clients[place]
        placement.ended(4)
    running.ended(1)
    wait_until(lambda: answers_of(server.coordinator) == 0)


def test_each_prompt_of_a_batch_is_looked_up_under_its_own_adapter(server: Server) -> None:
    placer = server.start_coordinator().placer
    load(server, "a", "x")
    load(server, "b", "x")
    wait_until(lambda: len(placer.replicas[1].adapters) == len(placer.replicas[0].adapters) == 2)
    for number, names in ((0, ("a",)), (1, ("b", ""))):
        for name in names:
            keys, _ = prompt(SHARED).of(0, f"{name}@x" if name else "")
            server.replicas[number].stores(keys, SHARED)
    wait_until(lambda: len(placer.replicas[1].contents.blocks) == 2 * len(SHARED) // BLOCK)
    for adapters, place in ((["a", "b", ""], 1), (["a", "a", "b"], 0)):
        placement = server.worker.place(wanted([*SHARED, 1], *adapters))
        assert placement.client is server.worker.clients[place]
        left = [tokens for tokens, _ in placer._placed["w"].waiting.values()]
        has = {0: ["a"], 1: ["b", ""]}[place]
        assert left == [1 if one in has else len(SHARED) + 1 for one in adapters]
        placement.ended(4)
        wait_until(lambda: answers_of(server.coordinator) == 0)


@pytest.mark.parametrize("coordinated", [True, False])
def test_only_who_has_an_adapter_is_asked_for_it(
    server: Server, http: FlaskClient, coordinated: bool
) -> None:
    """As after a restart of the other one."""
    if coordinated:
        server.start_coordinator()
    load(server, "a", "x", [1])
    wait_until(lambda: bool(server.worker.clients[1].ready.adapters))
    names = [one["id"] for one in http.get("/v1/models").get_json()["data"]]
    assert names == ["fake", "a"]
    body = {"prompt": "Hello", "max_tokens": 2, "model": "a"}
    for _ in range(4):
        assert http.post("/v1/completions", json=body).status_code == 200
    engines: list[FakeEngine] = [replica.engine for replica in server.replicas]
    assert [len(one.added) for one in engines] == [0, 4]
    batch = {"text": ["Hi", "Ho"], "lora_path": [None, "a"], "sampling_params": {}}
    assert http.post("/generate", json=batch).status_code == 200
    assert [len(one.added) for one in engines] == [0, 6]
    client = server.worker.clients[1]
    client.begin(wire.UnloadAdapter, "a").result(10)
    wait_until(lambda: not client.ready.adapters)
    assert http.post("/v1/completions", json=body).status_code == 404
