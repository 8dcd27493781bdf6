"""A router beside an engine: applies its KV events and compares the outcome with the cache."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from megatron_hybrid.cache.block_hash import DIGEST_SIZE, BlockKey, SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS, DEVICE, HOST
from megatron_hybrid.cache.prefix_store import PrefixStore
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.kv_events import (
    BlockRemoved,
    BlockStored,
    CacheContents,
    EventBatch,
    decode_batch,
    encode_batch,
    wire_hash,
)
from megatron_hybrid.kv_events.contents import Held, Stored
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
        if not isinstance(event, BlockStored | BlockRemoved):
            return
        held = self.held(event.medium)
        if isinstance(event, BlockRemoved):
            there = held.blocks if event.group_idx == BLOCKS else held.states
            assert there.keys() >= set(event.block_hashes)
        elif event.group_idx == BLOCKS:
            assert not held.blocks.keys() & set(event.block_hashes)
        else:
            known = held.states.get(event.block_hashes[0])
            assert known is None or known.has_logits != event.has_logits

    def held(self, medium: str | None) -> Held:
        """Of contents, also where nothing has been heard of it."""
        return self.contents.held.get(medium or "", Held())

    def stores(self) -> dict[str, PrefixStore]:
        """By medium."""
        transfers = self.engine.context.transfers
        behind = {HOST: transfers.tier.host} if isinstance(transfers, HostTransfers) else {}
        return {DEVICE: self.cache.store, **behind}

    def check(self) -> None:
        contents, cache = self.contents, self.cache
        assert contents.epoch == cache.epoch
        assert contents.has_attention == cache.geometry.has_attention
        assert contents.has_recurrent == cache.geometry.needs_state
        assert contents.held.keys() <= self.stores().keys()
        for medium, store in self.stores().items():
            self.check_held(self.held(medium), store)

    def check_held(self, held: Held, store: PrefixStore) -> None:
        blocks = {wire_hash(key): key for key in store.kv.kv_hash_to_block_id}
        assert held.blocks.keys() == blocks.keys()
        expected = {wire_hash(state.key): state.has_logits for state in store.states.cached()}
        states = {wire_hash(state.key): state.key for state in store.states.cached()}
        for key, _ in store.kv.tails.items():
            expected.setdefault(wire_hash(key), False)
            states[wire_hash(key)] = key
        assert {name: state.has_logits for name, state in held.states.items()} == expected
        known: dict[int, BlockKey] = blocks
        for name, stored in held.blocks.items():
            self.check_hash(blocks[name], stored, known)
        if store.geometry.has_attention:  # else the parents of states are known to nobody
            for name, stored in held.states.items():
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

        found = max(store.match(keys(), len(tokens)).skip for store in self.stores().values())
        assert self.contents.skippable(keys(), len(tokens)) == found

    def check_snapshot(self) -> None:
        """It says everything again, parents before their children."""
        copy = CacheContents(keeps_tokens=True)
        for portion in self.contents.snapshot():
            for event in decode_batch(encode_batch(EventBatch(0.0, portion))).events:
                parent = getattr(event, "parent_block_hash", None)
                there = copy.held.get(getattr(event, "medium", DEVICE), Held()).blocks
                assert parent is None or parent in there or not copy.has_attention
                copy.apply([event])
        for name in ("epoch", "block_size", "has_attention", "has_recurrent"):
            assert getattr(copy, name) == getattr(self.contents, name), name
        for medium, held in self.contents.held.items():
            assert vars(copy.held.get(medium, Held())) == vars(held), medium
