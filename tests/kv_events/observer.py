"""A router beside an engine: applies its KV events and compares the outcome with the cache."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from megatron_hybrid.cache.block_hash import DIGEST_SIZE, BlockKey, SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.kv_events import (
    BlockRemoved,
    BlockStored,
    CacheContents,
    EventBatch,
    decode_batch,
    encode_batch,
    wire_hash,
)
from megatron_hybrid.kv_events.contents import Stored
from megatron_hybrid.kv_events.messages import Event, events_of


class Observer:
    """Every event takes the way through bytes."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.cache = engine.context.cache
        self.contents = CacheContents(keeps_tokens=True)
        self.events: list[Event] = []
        self.changes = engine.cache_changes()

    def look(self) -> None:
        """Apply what has changed, and compare everything."""
        if changes := self.changes.take():
            batch = decode_batch(encode_batch(EventBatch(0.0, events_of(changes), 0)))
            self.events += batch.events
            for event in batch.events:
                self.check_that_it_says_something_new(event)
                self.contents.apply([event])
        self.check()

    def check_that_it_says_something_new(self, event: Event) -> None:
        """There are routers that count how often a block was stored."""
        contents = self.contents
        if isinstance(event, BlockStored) and event.group_idx == BLOCKS:
            assert not contents.blocks.keys() & set(event.block_hashes)
        elif isinstance(event, BlockStored):
            known = contents.states.get(event.block_hashes[0])
            assert known is None or known.has_logits != event.has_logits
        elif isinstance(event, BlockRemoved):
            there = contents.blocks if event.group_idx == BLOCKS else contents.states
            assert there.keys() >= set(event.block_hashes)

    def check(self) -> None:
        contents, cache = self.contents, self.cache
        assert contents.epoch == cache.epoch
        assert contents.has_attention == cache.geometry.has_attention
        assert contents.has_recurrent == cache.geometry.has_recurrent
        blocks = {wire_hash(key): key for key in cache.kv.kv_hash_to_block_id}
        assert contents.blocks.keys() == blocks.keys()
        expected = {wire_hash(state.key): state.has_logits for state in cache.states.cached()}
        states = {wire_hash(state.key): state.key for state in cache.states.cached()}
        for key, _ in cache.kv.tails.items():
            expected.setdefault(wire_hash(key), False)
            states[wire_hash(key)] = key
        assert {name: state.has_logits for name, state in contents.states.items()} == expected
        known: dict[int, BlockKey] = blocks
        for name, stored in contents.blocks.items():
            self.check_hash(blocks[name], stored, known)
        if cache.geometry.has_attention:  # else the parents of states are known to nobody
            for name, stored in contents.states.items():
                self.check_hash(states[name], stored, known)

    def check_hash(self, key: BlockKey, stored: Stored, known: dict[int, BlockKey]) -> None:
        """Whether an entry's tokens, parent, salt and adapter are those that its key stands for."""
        if stored.parent is None:
            parent = root_key(
                self.cache.epoch,
                stored.cache_salt or "",
                stored.adapter or "",
                self.cache.geometry.stored_as,
            )
        else:
            parent = known[stored.parent]
        assert stored.tokens is not None and len(stored.tokens) == stored.size
        data = np.asarray(stored.tokens, dtype="<i4").tobytes()
        assert blake2b(parent + data, digest_size=DIGEST_SIZE).digest() == key

    def check_prompt(self, tokens: list[int], salt: str = "", adapter: str = "") -> None:
        """A router that has applied all events knows what a prompt would skip."""
        array = np.asarray(tokens, dtype=np.int32)

        def keys() -> SequenceKeys:
            root = root_key(self.contents.epoch, salt, adapter, self.contents.stored_as)
            return SequenceKeys(root, self.contents.block_size, lambda a, b: array[a:b])

        found = self.cache.match(keys(), len(tokens)).skip
        assert self.contents.skippable(keys(), len(tokens)) == found

    def check_snapshot(self) -> None:
        """It says everything again, parents before their children."""
        copy = CacheContents(keeps_tokens=True)
        for portion in self.contents.snapshot():
            for event in decode_batch(encode_batch(EventBatch(0.0, portion))).events:
                parent = getattr(event, "parent_block_hash", None)
                assert parent is None or parent in copy.blocks or not copy.has_attention
                copy.apply([event])
        for name in ("epoch", "block_size", "has_attention", "has_recurrent", "blocks", "states"):
            assert getattr(copy, name) == getattr(self.contents, name), name
        assert copy._fills == self.contents._fills
