"""Where requests are placed: the index against brute force, and what the policies weigh."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS, LOGITS, STATES
from megatron_hybrid.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, wire_hash
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.replica import PromptKeys, Replica

BLOCK = 4
HYBRID = CacheSizes(BLOCK, 2 * BLOCK)


class Layers(NamedTuple):
    """What kinds of layers a model has, and how its cache is cut."""

    attention: bool
    recurrent: bool
    sizes: CacheSizes


HYBRID_LAYERS = Layers(True, True, HYBRID)
ATTENTION = Layers(True, False, CacheSizes(BLOCK, BLOCK))
RECURRENT = Layers(False, True, CacheSizes(BLOCK, BLOCK))

Prefix = tuple[str, tuple[int, ...]]  # a salt and tokens


def prompt(tokens: Sequence[int], salt: str = "") -> PromptKeys:
    return PromptKeys(array("i", tokens).tobytes(), BLOCK, salt)


def name_of(prefix: Prefix, epoch: int = 0) -> int:
    salt, tokens = prefix
    ids = np.asarray(tokens, dtype=np.int32)
    keys = SequenceKeys(root_key(epoch, salt), BLOCK, lambda low, high: ids[low:high])
    return wire_hash(keys.at(len(tokens)))


def cleared(layers: Layers, epoch: int = 0) -> AllBlocksCleared:
    """How the stream of a replica with such a cache begins."""
    return AllBlocksCleared(epoch, BLOCK, layers.attention, layers.recurrent)


def three(sizes: CacheSizes) -> dict[int, Replica]:
    return {number: Replica(sizes) for number in range(3)}


def hybrid_placer(policy: str, max_queue: int = 1_000_000) -> Placer:
    """Of three replicas that have just begun."""
    placer = Placer(policy, HYBRID, max_queue)
    for replica in range(3):
        placer.replicas[replica].contents.apply([cleared(HYBRID_LAYERS)])
    return placer


@dataclass
class Naive:
    """One replica by the definition: sets of prefixes, looked through from the longest one down."""

    layers: Layers
    epoch: int = 0
    blocks: set[Prefix] = field(default_factory=set)
    states: dict[Prefix, bool] = field(default_factory=dict)  # with logits or not
    expected: list[Prefix] = field(default_factory=list)

    def skips(self, salt: str, tokens: tuple[int, ...]) -> int:
        best = max((self.shared(one, salt, tokens) for one in self.expected), default=0)
        for end in range(len(tokens), 0, -1):
            full = range(BLOCK, end + 1, BLOCK)
            if self.layers.attention and any(
                (salt, tokens[:position]) not in self.blocks for position in full
            ):
                continue
            has_logits = self.states.get((salt, tokens[:end]))
            is_block = end % BLOCK == 0 and not self.layers.recurrent
            if has_logits or (end < len(tokens) and (has_logits is not None or is_block)):
                return max(best, end)
        return best

    def shared(self, other: Prefix, salt: str, tokens: tuple[int, ...]) -> int:
        if other[0] != salt:
            return 0
        same = 0
        for mine, theirs in zip(tokens, other[1], strict=False):
            if mine != theirs:
                break
            same += 1
        same = min(same - same % BLOCK, len(tokens) - 1)
        return same - same % self.layers.sizes.unit


CACHE = 5 * ("store", "store", "state", "state", "remove", "unstate", "logits") + ("clear",)
EVERYTHING = (*CACHE, *(5 * ("expect", "done")))


class Driver:
    """Random changes of three replicas, told to the index as events."""

    def __init__(self, seed: int, layers: Layers, replicas: dict[int, Replica]) -> None:
        self.random = random.Random(seed)
        self.layers = layers
        self.index = replicas
        self.replicas = [Naive(layers) for _ in range(3)]
        for number in range(3):
            replicas[number].contents.apply([cleared(layers)])
        self.waiting: list[tuple[int, Prefix, PromptKeys]] = []

    def sequence(self) -> Prefix:
        """Two tokens and two salts only, so that prefixes are shared often."""
        length = self.random.randrange(1, 6 * BLOCK)
        tokens = [self.random.randrange(2) if i % BLOCK == 0 else 0 for i in range(length)]
        return self.random.choice(("", "salt")), tuple(tokens)

    def change(self, kinds: Sequence[str]) -> None:
        number = self.random.randrange(3)
        naive, contents = self.replicas[number], self.index[number].contents
        salt, tokens = prefix = self.sequence()
        kind = self.random.choice(kinds)
        full = [(salt, tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        if kind == "store" and full and self.layers.attention:
            naive.blocks.update(full)
            names = [name_of(one, naive.epoch) for one in full]
            contents.apply(
                [BlockStored(names, None, list(tokens), BLOCK, None, "GPU", None, group_idx=BLOCKS)]
            )
        elif kind == "state":
            start = (len(tokens) - 1) // BLOCK * BLOCK
            parent = name_of((salt, tokens[:start]), naive.epoch) if start else None
            has_logits = self.random.random() < 0.5
            naive.states[prefix] = has_logits
            stored = BlockStored(
                [name_of(prefix, naive.epoch)],
                parent,
                list(tokens[start:]),
                len(tokens) - start,
                None,
                "GPU",
                None,
                group_idx=STATES,
                has_logits=has_logits,
            )
            contents.apply([stored])
        elif kind == "remove" and naive.blocks:
            gone = self.random.choice(sorted(naive.blocks))
            naive.blocks.discard(gone)
            contents.apply([BlockRemoved([name_of(gone, naive.epoch)], "GPU", BLOCKS)])
        elif kind == "unstate" and naive.states:
            gone = self.random.choice(sorted(naive.states))
            del naive.states[gone]
            contents.apply([BlockRemoved([name_of(gone, naive.epoch)], "GPU", STATES)])
        elif kind == "logits" and naive.states:
            gone = self.random.choice(sorted(naive.states))
            naive.states[gone] = False
            contents.apply([BlockRemoved([name_of(gone, naive.epoch)], "GPU", LOGITS)])
        elif kind == "expect":
            keys = prompt(tokens, salt)
            self.index[number].expect(keys)
            naive.expected.append(prefix)
            self.waiting.append((number, prefix, keys))
        elif kind == "done" and self.waiting:
            place = self.random.randrange(len(self.waiting))
            number, prefix, keys = self.waiting.pop(place)
            self.index[number].expect_no_more(keys)
            self.replicas[number].expected.remove(prefix)
        elif kind == "clear":
            naive.blocks.clear()
            naive.states.clear()
            naive.epoch += 1
            contents.apply([cleared(self.layers, naive.epoch)])


@pytest.mark.parametrize("layers", [HYBRID_LAYERS, ATTENTION, RECURRENT])
@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_what_each_replica_could_skip(seed: int, layers: Layers) -> None:
    driver = Driver(seed, layers, three(layers.sizes))
    found = 0
    for _ in range(400):
        driver.change(EVERYTHING)
        salt, tokens = driver.sequence()
        expected = {number: one.skips(salt, tokens) for number, one in enumerate(driver.replicas)}
        keys = prompt(tokens, salt)
        assert {one: driver.index[one].reusable(keys) for one in range(3)} == expected
        found += sum(expected.values())
    assert found > 1000


def test_nothing_is_left_of_what_is_over() -> None:
    driver = Driver(1, HYBRID_LAYERS, three(HYBRID))
    for _ in range(300):
        driver.change(EVERYTHING)
    for number, _, keys in driver.waiting:
        driver.index[number].expect_no_more(keys)
    for number in range(3):
        contents = driver.index[number].contents
        contents.apply([cleared(HYBRID_LAYERS, 1)])
        assert not driver.index[number].expected
        assert not contents.blocks and not contents.states and not contents.held["GPU"].fills


@pytest.mark.parametrize("seed", range(5))
def test_a_request_goes_where_it_is_computed_first(seed: int) -> None:
    """Without answers, so that nothing but prompts counts."""
    placer = hybrid_placer("longest_prefix")
    driver = Driver(seed, HYBRID_LAYERS, placer.replicas)
    waiting: dict[str, tuple[int, Prefix, int]] = {}  # replica, prompt, tokens to compute
    chosen_often = [0, 0, 0]
    for number in range(200):
        for _ in range(3):
            driver.change(CACHE)
        if waiting and driver.random.random() < 0.9:
            name = driver.random.choice(sorted(waiting))
            replica, prefix, _ = waiting.pop(name)
            driver.replicas[replica].expected.remove(prefix)
            placer.start(f"{name}-0")
        salt, tokens = prefix = driver.sequence()
        own = [len(tokens) - one.skips(salt, tokens) for one in driver.replicas]
        costs = [
            own[replica] * (1 + placer.replicas[replica].answers)
            + sum(work for where, _, work in waiting.values() if where == replica)
            for replica in range(3)
        ]
        chosen = placer.place(f"r{number}", [prompt(tokens, salt)], 1, 0, [0, 1, 2])
        assert costs[chosen] == min(costs)
        waiting[f"r{number}"] = chosen, prefix, own[chosen]
        driver.replicas[chosen].expected.append(prefix)
        chosen_often[chosen] += 1
    assert min(chosen_often) > 20


def place(placer: Placer, name: str, tokens: Sequence[int], **more: int) -> int:
    return placer.place(
        name, [prompt(tokens)], more.get("choices", 1), more.get("max_tokens"), [0, 1]
    )


def test_a_prefix_is_waited_for_as_long_as_computing_it_takes() -> None:
    placer = hybrid_placer("longest_prefix")
    shared = list(range(10 * BLOCK))
    home = place(placer, "first", shared)
    busy = place(placer, "other", list(range(1000, 1000 + 5 * BLOCK)))
    assert busy == 1 - home
    # 40 tokens and then 1 are to be computed there, 20 and then 41 elsewhere, and one answer runs
    # on either.
    assert place(placer, "second", [*shared, 1]) == home
    for name in ("first", "second", "other"):
        placer.end(name)
    placer.replicas[home].contents.apply(hybrid_prefix(shared))
    # Seven times 4 tokens, and 1 token that eight wait for: less than the 41 that it has not.
    for number in range(7):
        placer.place(f"load-{number}", [prompt([2000 + number] * BLOCK)], 1, 0, [home])
    assert place(placer, "third", [*shared, 1], max_tokens=0) == home
    placer.place("load-9", [prompt([2009] * 2 * BLOCK)], 1, 0, [home])
    assert place(placer, "fourth", [*shared, 2], max_tokens=0) == 1 - home


@pytest.mark.parametrize("seed", range(3))
def test_samples_of_one_prompt_that_come_one_by_one_and_mixed_share_a_replica(seed: int) -> None:
    placer = hybrid_placer("longest_prefix")
    placer.place("ended", [prompt([1])], 1, None, [0])
    placer.end("ended", tokens=100)  # so this is how long answers are
    for number in (0, 1):  # an idle one would rather compute a prompt once more than wait
        placer.place(f"busy/{number}", [prompt([number] * 400 * BLOCK)], 1, None, [number])
    prompts = [list(range(10_000 * i, 10_000 * i + 400 * BLOCK)) for i in range(1, 5)]
    requests = [(i, sample) for i in range(4) for sample in range(8)]
    random.Random(seed).shuffle(requests)
    places: dict[int, set[int]] = {i: set() for i in range(4)}
    for i, sample in requests:
        places[i].add(place(placer, f"{i}/{sample}", prompts[i]))
    assert all(len(found) == 1 for found in places.values())
    assert set.union(*places.values()) == {0, 1}
    # Unless more answers run there than the prompt is worth.
    (home,) = places[0]
    placer.place("more", [prompt([1])], 1000, None, [home])
    placer.start("more-0")
    assert place(placer, "0/8", prompts[0]) == 1 - home


def hybrid_prefix(tokens: list[int]) -> list[BlockStored]:
    """Events of a prefix of whole blocks, with a state at its end."""
    names = prompt(tokens).blocks()
    parent = names[-2] if len(names) > 1 else None
    state = BlockStored(
        names[-1:], parent, tokens[-BLOCK:], BLOCK, None, "GPU", None, group_idx=STATES
    )
    return [BlockStored(names, None, tokens, BLOCK, None, "GPU", None, group_idx=BLOCKS), state]


def test_kv_without_a_state_is_worth_nothing_to_a_hybrid() -> None:
    shared = list(range(10 * BLOCK))
    kv, state = hybrid_prefix(shared)
    placer = hybrid_placer("longest_prefix")
    placer.replicas[1].contents.apply([kv])
    keys = prompt([*shared, 1])
    assert [placer.replicas[one].reusable(keys) for one in (0, 1)] == [0, 0]
    placer.replicas[1].contents.apply([state])
    assert [placer.replicas[one].reusable(keys) for one in (0, 1)] == [0, len(shared)]
    salted = prompt([*shared, 1], "salt")
    assert [placer.replicas[one].reusable(salted) for one in (0, 1)] == [0, 0]
    assert place(placer, "a", [*shared, 1]) == 1


def test_answers_that_run_count_by_the_steps_that_they_share() -> None:
    placer = hybrid_placer("longest_prefix")
    placer.place("ended", [prompt([1])], 1, None, [0])
    placer.end("ended", tokens=100)  # so this is how long answers are
    for number in range(4):
        placer.place(f"r{number}", [prompt([number + 2])], 1, None, [0])
        placer.start(f"r{number}-0")
    # A new answer and each of the four delay one another by 100 * 100 / 200 = 50 tokens: 400.
    shared = list(range(1000, 1000 + 100 * BLOCK))
    placer.replicas[0].contents.apply(hybrid_prefix(shared))
    assert place(placer, "a", [*shared, 1]) == 1
    placer.end("a")
    placer.end("r0", tokens=100)
    assert place(placer, "b", [*shared, 1]) == 0  # 300 against the 400 that it has
    placer.end("b")
    # An answer of one token does not wait long for others.
    placer.place("r4", [prompt([6])], 1, None, [0])
    placer.start("r4-0")
    assert place(placer, "c", [*shared, 1], max_tokens=1) == 0


def test_all_prompts_and_answers_of_a_request_count_where_it_is() -> None:
    placer = hybrid_placer("load_balanced")
    prompts = [prompt([1] * 10), prompt([2] * 20)]
    replica = placer.place("many", prompts, 3, None, [0, 1])
    assert (placer.replicas[replica].prefill, placer.replicas[replica].answers) == (30, 6)
    placer.start("many-1")
    assert placer.replicas[replica].prefill == 10
    placer.end("many", tokens=60)
    assert (placer.replicas[replica].prefill, placer.replicas[replica].answers) == (0, 0)


def test_prompts_of_one_request_share_their_prefix() -> None:
    placer = hybrid_placer("longest_prefix")
    shared = [7] * 4 * BLOCK
    prompts = [prompt([*shared, number]) for number in range(3)]
    replica = placer.place("many", prompts, 1, None, [0, 1])
    assert placer.replicas[replica].prefill == 4 * BLOCK + 3


def test_a_full_queue_is_no_place_while_another_one_has_room() -> None:
    placer = hybrid_placer("longest_prefix", max_queue=4)
    shared = [7] * 4 * BLOCK
    home = place(placer, "a", shared)
    placer.start("a-0")
    placer.replicas[home].contents.apply(hybrid_prefix(shared))
    assert place(placer, "b", [*shared, 1], choices=3) == home
    assert place(placer, "c", [*shared, 1]) == home
    assert place(placer, "d", [*shared, 1]) == 1 - home
    # Nobody has room for so many: it goes where it would be done first, which says why not.
    assert place(placer, "e", [*shared, 1], choices=5) == home


def test_answers_that_run_take_no_place_in_the_queue() -> None:
    placer = hybrid_placer("first_prefix_block", max_queue=2)
    shared = [7] * 4 * BLOCK
    places = []
    for number in range(8):
        places.append(place(placer, f"a{number}", [*shared, number]))
        placer.start(f"a{number}-0")
    assert len(set(places)) == 1
    assert placer.replicas[places[0]].waiting == 0
    assert placer.replicas[places[0]].answers == 8


def test_the_first_block_decides_and_a_lost_replica_moves_only_its_own_prompts() -> None:
    placer = hybrid_placer("first_prefix_block")
    generator = random.Random(1)
    prompts = [[generator.randrange(100) for _ in range(3 * BLOCK)] for _ in range(300)]

    def places(replicas: list[int], tail: int) -> list[int]:
        return [
            placer.place(f"{tail} {n}", [prompt([*tokens[:BLOCK], tail])], 1, None, replicas)
            for n, tokens in enumerate(prompts)
        ]

    before = places([0, 1, 2], 1)
    assert places([0, 1, 2], 2) == before  # whatever comes after the block, and with any load
    assert all(before.count(replica) > 60 for replica in range(3))
    after = places([0, 2], 3)
    assert [one for one in before if one != 1] == [
        new for new, old in zip(after, before, strict=True) if old != 1
    ]


def test_with_bounded_loads_the_same_beginning_has_a_place_and_a_next_one() -> None:
    placer = hybrid_placer("bounded_rendezvous")
    shared = [7] * BLOCK
    first = place(placer, "a", [*shared, 1])
    # Of two replicas none gets more than 1.5 times half of what runs.
    places = [place(placer, f"b{number}", [*shared, number]) for number in range(11)]
    assert [places.count(first), places.count(1 - first)] == [8, 3]
    for number in range(11):
        placer.end(f"b{number}")
    placer.end("a")
    assert place(placer, "c", [*shared, 9]) == first
    placer.lose(first)
    assert placer.place("d", [prompt([*shared, 9])], 1, None, [1 - first]) == 1 - first


@pytest.mark.parametrize("policy", ["first_prefix_block", "bounded_rendezvous"])
def test_what_is_short_of_a_block_goes_to_the_least_busy_replica(policy: str) -> None:
    placer = hybrid_placer(policy)
    assert {place(placer, f"r{number}", [1]) for number in range(2)} == {0, 1}


def test_load_balanced_looks_at_work_alone() -> None:
    placer = hybrid_placer("load_balanced")
    shared = [7] * 20 * BLOCK
    home = place(placer, "a", shared)
    assert place(placer, "b", shared) == 1 - home
    assert place(placer, "c", [1, 2, 3]) == home  # as much to do, less in its cache so far
    assert place(placer, "d", [1, 2, 3]) == 1 - home


def test_where_nothing_else_decides_memory_is_filled_evenly() -> None:
    placer = hybrid_placer("longest_prefix")
    for number in range(20):
        replica = place(placer, f"r{number}", [number] * 3 * BLOCK)
        placer.end(f"r{number}", tokens=1)
        placer.replicas[replica].contents.apply(hybrid_prefix([number] * 3 * BLOCK))
    assert [len(placer.replicas[replica].contents.blocks) for replica in (0, 1)] == [30, 30]


def test_a_lost_replica_and_a_moved_request_leave_no_load() -> None:
    placer = hybrid_placer("longest_prefix")
    home = place(placer, "a", [1] * 40)
    placer.move("a", 1 - home, 1)
    assert (placer.replicas[home].prefill, placer.replicas[home].answers) == (0, 0)
    assert placer.replicas[1 - home].answers == 1
    placer.move("unknown", 1 - home, 3)
    assert placer.replicas[1 - home].answers == 4
    placer.lose(1 - home)
    assert (placer.replicas[1 - home].prefill, placer.replicas[1 - home].answers) == (0, 0)
    placer.end("a", tokens=5)  # comes later, and is nothing any more
    assert placer.replicas[1 - home].answers == 0
    assert not any(one.expected for one in placer.replicas.values())
