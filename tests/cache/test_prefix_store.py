"""PrefixIndex: against a matcher that compares every prefix with everything that is cached."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import expected_answer, make_engine, random_tokens
from tests.thorough import A_THIRD

B = 4
Prefix = tuple[object, ...]  # a salt, and tokens


class Everything:
    """All prefixes that were ever computed, by their keys."""

    def __init__(self, cache) -> None:  # type: ignore[no-untyped-def]
        self.cache = cache
        self.prefix_of: dict[bytes, Prefix] = {}

    def add(self, salt: str, tokens: list[int]) -> None:
        keys = self.keys(salt, tokens)
        for position in range(1, len(tokens) + 1):
            self.prefix_of[keys.at(position)] = (salt, *tokens[:position])

    def keys(self, salt: str, tokens: list[int]) -> SequenceKeys:
        array = np.asarray(tokens, dtype=np.int32)
        return SequenceKeys(self.cache.root(salt), B, lambda start, end: array[start:end])

    def states(self) -> dict[Prefix, CachedState]:
        return {self.prefix_of[state.key]: state for state in self.cache.states.cached()}

    def blocks(self) -> dict[Prefix, int]:
        mapped = self.cache.kv.kv_hash_to_block_id
        return {self.prefix_of[key]: block for key, block in mapped.items()}

    def tails(self) -> dict[Prefix, int]:
        return {self.prefix_of[key]: tail.block for key, tail in self.cache.kv.tails.items()}

    def check(self, salt: str, tokens: list[int]) -> int:
        """Compare a match with brute force; returns what it skips."""
        geometry, length = self.cache.geometry, len(tokens)
        states, blocks, tails = self.states(), self.blocks(), self.tails()

        def prefix(position: int) -> Prefix:
            return (salt, *tokens[:position])

        count = 0
        while count < length // B and prefix((count + 1) * B) in blocks:
            count += 1
        if not geometry.has_attention:
            count = length // B

        def is_usable(position: int) -> bool:
            if position // B > count:
                return False
            if position % B and prefix(position) not in tails:
                return False
            if position == length:
                return prefix(position) in states and states[prefix(position)].has_logits
            return prefix(position) in states or not geometry.has_recurrent

        skip = next((p for p in range(length, 0, -1) if is_usable(p)), 0)
        keys = self.keys(salt, tokens)
        match = self.cache.match(keys, length)
        assert match.skip == skip
        shared = count if skip == length else min(count, (length - 1) // B)
        if geometry.has_attention:
            assert match.blocks == [blocks[prefix((i + 1) * B)] for i in range(shared)]
            assert match.matched_tokens == max(shared * B, skip)
            copies = skip % B and skip // B >= shared
            assert match.tail_block == (tails[prefix(skip)] if copies else 0)
        else:
            assert match.blocks == [] and match.tail_block == 0
        assert match.state is states.get(prefix(skip)) or not skip
        all_logits = self.cache.match(keys, length, most=0)
        assert (all_logits.skip, all_logits.state, all_logits.tail_block) == (0, None, 0)
        assert all_logits.blocks == match.blocks[: (length - 1) // B]
        most = (7 * length) // 8
        limited = self.cache.match(keys, length, most=most)
        assert limited.skip == next((p for p in range(most, 0, -1) if is_usable(p)), 0)
        assert limited.blocks == all_logits.blocks  # also those behind it
        return skip


@A_THIRD
@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_matches_agree_with_brute_force(kind: str, exact_ends: bool, seed: int):
    rng = np.random.default_rng(seed)
    engine = make_engine(
        attention=kind != "recurrent", recurrent=kind != "attention", exact_ends=exact_ends,
        num_blocks=int(rng.integers(30, 60)), cached_slots=int(rng.integers(3, 20)),
        max_tokens=int(rng.choice([9, 30])), kernel_chunk=int(rng.choice([4, 8])),
        interval=int(rng.choice([0, 12])), max_seq_length=100,
        policy=str(rng.choice(["lru", "replay_cost"])),
    )  # fmt: skip
    everything = Everything(engine.context.cache)
    bases = [random_tokens(seed * 7 + i, 60) for i in range(2)]
    requests: list[tuple[str, list[int]]] = []
    skips: list[int] = []
    for turn in range(60):
        base = bases[int(rng.integers(2))]
        own = rng.integers(0, 97, int(rng.integers(0, 3))).tolist()
        prompt = base[: int(rng.integers(1, 60))] + own
        salt = str(rng.choice(["", "", "s"]))
        params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 20)))
        engine.add_request(f"r{turn}", prompt, params, cache_salt=salt)
        everything.add(salt, prompt + expected_answer(prompt, params.max_tokens or 0))
        for _ in range(int(rng.integers(1, 8))):
            engine.step()
        requests.append((salt, prompt))
        for salt, prompt in requests[-4:]:
            longer = prompt + rng.integers(0, 97, int(rng.integers(0, 6))).tolist()
            for tokens in (prompt, longer, longer[: int(rng.integers(1, len(longer) + 1))]):
                skips.append(everything.check(salt, tokens))
    assert max(skips) > 20 and len(set(skips)) > 5
