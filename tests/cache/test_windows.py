"""Sliding windows in the cache: which prefixes can be gone on from, by an oracle that looks at what
is in memory; what is given back while a request runs; what everybody is promised."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.checkpoint_placement import ANSWER_END, CheckpointPlacement
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.window_blocks import WindowBlocks
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted
from tests.thorough import A_THIRD, usually

B = 4


def geometry(
    window: int,
    *,
    attention: bool = True,
    recurrent: bool = True,
    max_requests: int = 3,
    cached_slots: int = 8,
    num_blocks: int = 40,
    spare: int = 6,
    **others: int,
) -> CacheGeometry:
    """`spare`: window blocks beside those that are promised."""
    sizes = CacheGeometry(
        B, 1, num_blocks * attention, max_requests, cached_slots, int(attention), int(recurrent),
        window=window, bytes_per_window_block=1, **others,
    )  # fmt: skip
    return replace(sizes, num_window_blocks=max_requests * sizes.window_quota + 1 + spare)


def cache_of(sizes: CacheGeometry, policy: str = "replay_cost") -> HybridCache:
    return HybridCache(sizes, policy=policy, checkpoints=CheckpointPlacement(sizes, interval=12))


# ---------------------------------------------------------------- what a window takes


@pytest.mark.parametrize("granule", [1, 8])
@pytest.mark.parametrize("alignment", [0, 12])
@pytest.mark.parametrize("ahead", [1, 6])
def test_the_quota_is_what_a_request_needs_at_the_worst_position(
    granule: int, alignment: int, ahead: int
) -> None:
    for window in range(1, 30):
        sizes = geometry(window, granule=granule, window_alignment=alignment, most_ahead=ahead)
        step, needed, kept = alignment or B, 0, 0
        for position in range(200):
            state = position // granule * granule  # that it would leave if it had to stop
            seen = max(0, state - (window - 1))  # the first token that is read behind it
            first = max(k * step for k in range(200) if k * step <= seen)
            assert sizes.first_in_window(position) == first // B
            needed = max(needed, len({t // B for t in range(first, position + ahead)}))
            if position == state:
                kept = max(kept, len({t // B for t in range(first, state)}))
        # where states lie on a grid, not every position has one
        assert needed <= sizes.window_quota <= needed + (granule > 1)
        assert kept <= sizes.window_of_state <= kept + (granule > 1)


def test_positions_of_many_requests_are_looked_up_at_once() -> None:
    sizes = geometry(9)
    positions = np.arange(100)
    expected = [sizes.first_in_window(position) for position in range(100)]
    assert sizes.first_in_window(positions).tolist() == expected


def test_a_block_is_free_when_nobody_holds_or_keeps_it() -> None:
    pool = WindowBlocks(4)
    blocks = pool.allocate(2)
    pool.keep(blocks[:1])
    assert (pool.num_free, pool.num_held, pool.num_evictable) == (2, 2, 0)
    pool.release(blocks)
    assert (pool.num_free, pool.num_held, pool.num_evictable) == (3, 0, 1)
    pool.hold(blocks[:1])
    pool.drop(blocks[:1])
    assert (pool.num_free, pool.num_held, pool.num_evictable) == (3, 1, 0)
    pool.check_integrity([blocks[:1]], [])
    pool.release(blocks[:1])
    assert pool.num_free == 4
    pool.check_integrity([], [])


# ---------------------------------------------------------------- requests that run


class Request:
    """Computes prefix hashes: each entry of KV, and each state, is what it has seen."""

    def __init__(self, machine: Machine, text: list[int], prompt: int) -> None:
        self.machine, self.text, self.prompt = machine, text, prompt
        cache = machine.cache
        keys = SequenceKeys(
            cache.root(), B, lambda start, end: np.asarray(self.text[start:end], dtype=np.int32)
        )
        match = cache.match(keys, prompt)
        assert match.skip == machine.longest(text[:prompt])
        self.lease: Lease = cache.admit(match, keys, prompt)
        self.position = match.skip
        if self.lease.copy is not None:
            self._copy(machine.kv, self.lease.copy)
        assert self.lease.window is not None
        if self.lease.window.copy is not None:
            self._copy(machine.window, self.lease.window.copy)
        if match.skip == prompt:
            self._was_launched()

    def _copy(self, memory: dict[int, int], copy: tuple[int, int, int]) -> None:
        source, destination, count = copy
        for i in range(count):
            memory[destination * B + i] = memory[source * B + i]

    def _was_launched(self) -> None:
        self.machine.cache.tail_was_copied(self.lease)
        self.machine.cache.state_was_read(self.lease)

    def chunk(self, most: int) -> None:
        """A step that computes some of the prompt, or a token."""
        cache, lease, machine = self.machine.cache, self.lease, self.machine
        windows, size = cache.windows, cache.geometry
        in_prompt = self.position < self.prompt
        end = min(self.position + most, self.prompt) if in_prompt else self.position + 1
        if not in_prompt:
            if size.has_attention and len(lease.blocks) * B <= self.position:
                try:
                    cache.extend(lease)
                except KVBlocksExhausted:
                    return
        else:
            end = min(end, windows.reach(lease))
            assert end > self.position
            for position, _ in lease.planned(self.position):
                if position <= end and cache.placement.needs_break(position):
                    end = position
                    break
        checkpoints = []
        if in_prompt:
            checkpoints = cache.reserve_checkpoints(lease, self.position, end)
        windows.extend_to(lease, end)
        self.write(self.position, end)
        self._was_launched()
        cache.publish_blocks(lease, end)
        for checkpoint in checkpoints:
            machine.states[checkpoint.slot] = machine.hash(self.text[: checkpoint.position])
            cache.publish_state(lease, checkpoint, at_end=checkpoint.position == end)
        self.position = end
        windows.move_on(lease, end)

    def write(self, start: int, end: int) -> None:
        """The KV of these tokens, and look at what they read."""
        machine, table = self.machine, self.lease.window
        assert table is not None
        size = machine.cache.geometry
        for position in range(start, end):
            place = table.blocks[position // B - table.first] * B + position % B
            machine.window[place] = machine.hash(self.text[: position + 1])
            if size.has_attention and position >= self.lease.num_shared * B:
                machine.kv[self.lease.blocks[position // B] * B + position % B] = machine.hash(
                    self.text[: position + 1]
                )
        for position in range(max(0, start - size.window + 1), end):
            place = table.blocks[position // B - table.first] * B + position % B
            assert machine.window[place] == machine.hash(self.text[: position + 1])

    def stop(self) -> None:
        cache, machine, lease = self.machine.cache, self.machine, self.lease
        if self.position >= self.prompt:
            if lease.read_slot == lease.write_slot:
                machine.states[lease.write_slot] = machine.hash(self.text[: self.position])
            cache.keep_end(lease, self.position, ANSWER_END)
        cache.release(lease)
        machine.running.remove(self)


class Machine:
    """Requests of few texts, and what is in memory."""

    def __init__(self, sizes: CacheGeometry, seed: int, policy: str) -> None:
        self.random = random.Random(seed)
        self.cache = cache_of(sizes, policy)
        self.kv: dict[int, int] = {}
        self.window: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.running: list[Request] = []
        self.texts = [[self.random.randrange(50) for _ in range(120)] for _ in range(3)]
        self.skipped = self.refused = 0

    def hash(self, tokens: list[int]) -> int:
        return hash(tuple(tokens))

    def text(self) -> list[int]:
        fork = self.random.randrange(100)
        own = [self.random.randrange(50, 99) for _ in range(120 - fork)]
        return self.random.choice(self.texts)[:fork] + own

    def longest(self, prompt: list[int]) -> int:
        """The longest prefix that can be gone on from, by all that is in memory: for each position,
        the KV of all tokens, a cached state there, and KV of the window before it."""
        store, size, found = self.cache.store, self.cache.geometry, 0
        keys = SequenceKeys(
            self.cache.root(), B, lambda start, end: np.asarray(prompt[start:end], dtype=np.int32)
        )
        for end in range(1, len(prompt) + 1):
            state = store.states.get(keys.at(end))
            if state is None or (end == len(prompt) and not state.has_logits):
                continue
            blocks = [
                store.kv.kv_hash_to_block_id.get(keys.at(k * B)) for k in range(1, end // B + 1)
            ]
            if end % B:
                tail = store.kv.tails.get(keys.at(end))
                full = (
                    store.kv.kv_hash_to_block_id.get(keys.at(end // B * B + B))
                    if (len(prompt) >= end // B * B + B)
                    else None
                )
                blocks.append(full if tail is None else tail.block)
            seen = range(max(0, end - size.window + 1), end)
            first = end - len(state.window) * B + (-end % B)  # of the first block that is kept
            there = all(
                first <= position
                and self.window.get(state.window[(position - first) // B] * B + position % B)
                == self.hash(prompt[: position + 1])
                for position in seen
            )
            if size.has_attention:
                there = (
                    there
                    and None not in blocks
                    and all(
                        self.kv.get(blocks[p // B] * B + p % B) == self.hash(prompt[: p + 1])
                        for p in range(end)
                    )
                )
            # What is found has to be usable, and what is usable is found.
            assert there, f"a state at {end} is cached whose KV is not"
            if size.has_recurrent:
                assert state.has_logits or self.states[state.slot] == self.hash(prompt[:end])
            found = end
        return found

    def step(self) -> None:
        choice, cache = self.random.random(), self.cache
        cache.begin_step(cache.states.queue.now + 1)
        if choice < 0.25 and len(self.running) < cache.geometry.max_requests:
            text = self.text()
            try:
                request = Request(self, text, self.random.randrange(1, 100))
            except (KVBlocksExhausted, StatePoolExhausted):
                self.refused += 1
            else:
                self.skipped += request.lease.skip
                self.running.append(request)
        elif choice < 0.35 and self.running:
            self.random.choice(self.running).stop()
        elif choice < 0.36:
            cache.reset()
        elif self.running:
            self.random.choice(self.running).chunk(self.random.choice([1, 3, 30]))
        cache.check_integrity([request.lease for request in self.running])

    def finish(self) -> None:
        for request in list(self.running):
            request.stop()
        self.cache.check_integrity([])
        use = self.cache.occupancy()
        assert use.window_used == use.kv_used == use.state_live == 0
        self.cache.reset()
        assert self.cache.occupancy().window_free == use.window_blocks


@A_THIRD
@pytest.mark.parametrize("window", [1, 2, 4, 5, 11, 30])
@pytest.mark.parametrize(
    ("attention", "recurrent"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_what_can_be_gone_on_from_is_found_and_nothing_else(
    window: int, attention: bool, recurrent: bool
) -> None:
    """Requests come, compute, stop and are forgotten; pools are small."""
    skipped = 0
    for seed in range(usually(2, 20)):
        policy = ("replay_cost", "lru", "ref_zero")[seed % 3]
        spare = (0, 3, 30)[seed % 3]
        sizes = geometry(window, attention=attention, recurrent=recurrent, spare=spare)
        machine = Machine(sizes, seed, policy)
        for _ in range(250):
            machine.step()
        machine.finish()
        skipped += machine.skipped
    assert skipped > 100  # or nothing was shown


def test_blocks_behind_the_window_are_given_back_while_a_request_runs() -> None:
    sizes = geometry(9, num_blocks=600, cached_slots=0)
    machine = Machine(sizes, 0, "replay_cost")
    machine.texts = [[token % 50 for token in range(2000)]]
    request = Request(machine, machine.texts[0], 1500)
    machine.running.append(request)
    most = 0
    while request.position < 1900:
        request.chunk(16)
        assert request.lease.window is not None
        most = max(most, len(request.lease.window.blocks))
        used = machine.cache.occupancy().window_used
        assert used == len(request.lease.window.blocks) <= sizes.window_quota
    assert most == sizes.window_quota == 3  # whatever the length
    machine.finish()


def test_states_whose_windows_overlap_share_blocks() -> None:
    sizes = geometry(30, spare=40)
    machine = Machine(sizes, 0, "lru")
    request = Request(machine, machine.texts[0], 97)
    machine.running.append(request)
    while request.position < 97:
        request.chunk(12)
    request.stop()
    states = machine.cache.states.cached()
    kept = [block for state in states for block in state.window]
    assert len(states) > 3 and len(kept) > len(set(kept))
    use = machine.cache.occupancy()
    assert use.window_evictable == len(set(kept)) and use.window_used == 0


def test_nobody_is_admitted_who_could_lack_blocks_later() -> None:
    """As many run as are promised their windows, whatever else is kept or held."""
    sizes = geometry(11, max_requests=2, spare=1, cached_slots=4)
    machine = Machine(sizes, 0, "lru")
    first = Request(machine, machine.texts[0], 90)
    first.chunk(30)
    table, windows = first.lease.window, machine.cache.windows
    assert table is not None
    windows.extend_to(first.lease, windows.reach(first.lease))
    surplus = len(table.blocks) - sizes.window_quota
    assert surplus == sizes.num_window_blocks - sizes.window_quota  # all that is left
    with pytest.raises(KVBlocksExhausted, match="window blocks"):
        Request(machine, machine.texts[1], 20)
    first.position = table.end * B
    windows.move_on(first.lease, first.position)
    second = Request(machine, machine.texts[1], 20)
    for request in (first, second):
        machine.cache.release(request.lease)
    machine.cache.check_integrity([])


def test_a_pin_keeps_the_window_of_a_state_unless_others_were_promised_it() -> None:
    sizes = geometry(11, max_requests=1, spare=3)
    machine = Machine(sizes, 0, "lru")
    request = Request(machine, machine.texts[0], 30)
    machine.running.append(request)
    while request.position < 30:
        request.chunk(30)
    cache = machine.cache
    pin = cache.pin(request.lease, 30)
    assert pin is not None and len(pin.window) == 3
    cache.check_integrity([request.lease], [pin])
    assert cache.pin(request.lease, 28) is None  # no room for one more
    cache.check_integrity([request.lease], [pin])
    cache.store.unpin(pin)
    request.stop()
    cache.check_integrity([])


def test_windows_are_kept_where_recurrent_states_would_be() -> None:
    placed = []
    for recurrent in (True, False):
        placement = CheckpointPlacement(geometry(9, recurrent=recurrent), interval=12)
        of_waiters = placement.for_waiters([(21, 2), (33, 1)], 4, 8, 60)
        placed.append((placement.for_prompt(61, 8, 24), of_waiters))
    assert placed[0] == placed[1] and len(placed[0][0]) > 3 and len(placed[0][1]) == 2
