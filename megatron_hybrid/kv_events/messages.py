"""The events on the wire: vLLM's, field by field, and a few optional fields of our own.

A ZMQ message is [topic, sequence number (8 bytes, big-endian), payload]; the payload is msgpack of
an EventBatch: an array [seconds, events, replica] whose events are maps with the key "type".
(vLLM's events were arrays too before its pull request 42892 of June 2026; Dynamo and llm-d read
both.)

Groups (the kinds of `cache.changes`) are told apart by `group_idx`, as vLLM does for hybrid models:

- BLOCKS: KV blocks of attention layers, `kv_cache_spec_kind` "full_attention".
- STATES: recurrent states and exact ends, "mamba" in any model: positions at which a sequence can
  be continued, one in each event; docs/routing.md says why, and what their fields are off the
  blocks' ends.
- LOGITS, in BlockRemoved alone: the state stays, but what `has_logits` said of it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import msgspec

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.changes import BLOCKS, STATES, Change, Cleared, Removed, Stored

KINDS = {BLOCKS: "full_attention", STATES: "mamba"}


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Tagged by its class's name under "type". Decoders ignore keys that they do not know."""


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of one sequence can be reused, or (in STATES) one state can.

    Hashes are 64-bit numbers; `token_ids` are those of these blocks, one after another.
    """

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before them; None at a sequence's beginning
    token_ids: list[int]
    block_size: int  # tokens in each of them
    lora_id: int | None  # of old; we have names only
    medium: str | None
    lora_name: str | None  # the adapter
    # Of each block what its hash depends on besides tokens: the adapter's name and, in a sequence's
    # first block, the cache salt; None for nothing.
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    # Ours, also known to Dynamo: the salt of the sequence, with every one of its events.
    cache_salt: str | None = None
    # Ours: the logits after the last token are there too, so that a prompt that ends here need not
    # compute anything.
    has_logits: bool = False


class BlockRemoved(KVCacheEvent, frozen=True):
    """These can't be reused any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Nothing can be reused. The first event of a stream and of a snapshot; our own fields say what
    kind of cache it is, and what its hashes are chained to."""

    epoch: int = 0  # of the weights; part of every hash: see cache.block_hash.root_key
    block_size: int = 0  # tokens
    has_attention: bool = True
    has_recurrent: bool = False
    stored_as: str = ""  # the type of keys and values; part of every hash, too


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What has changed in one step, in this order."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None  # the replica


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """The payload of a message."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(payload)


def wire_hash(key: BlockKey) -> int:
    """A prefix's key as it goes out: the last 64 of its bits, big-endian, as vLLM does.

    Routers take integers of 64 bits. Among a million blocks two are mixed up with a chance of 3e-8,
    and then a request is placed badly.
    """
    return int.from_bytes(key[-8:], "big")


def events_of(changes: Iterable[Change]) -> list[Event]:
    """Changes of a cache as they go out: what goes one after another goes in one event."""
    events: list[Event] = []
    for removed, alike in groupby(changes, lambda one: isinstance(one, Removed) and one[1:]):
        if not removed:
            events += [_event_of(one) for one in alike if not isinstance(one, Removed)]
        else:
            kind, medium = removed
            hashes = [wire_hash(one.key) for one in alike if isinstance(one, Removed)]
            events.append(BlockRemoved(hashes, medium, kind))
    return events


def _event_of(change: Stored | Cleared) -> Event:
    if isinstance(change, Cleared):
        cut = change.geometry
        return AllBlocksCleared(
            change.epoch, cut.block_size, cut.has_attention, cut.needs_state, cut.stored_as
        )
    hashes = [wire_hash(key) for key in change.keys]
    parent = None if change.parent is None else wire_hash(change.parent)
    return stored_event(hashes, parent, change.tokens.tolist(), *change[3:])


def stored_event(
    hashes: list[int],
    parent: int | None,
    tokens: list[int],
    block_size: int,
    group: int,
    adapter: str | None,
    cache_salt: str | None,
    has_logits: bool,
    medium: str,
) -> BlockStored:
    """The event of consecutive blocks, or of one state, with everything that follows from these."""
    extra_keys: list[list[str] | None] | None = None
    if adapter or cache_salt:
        named = [adapter] if adapter else []
        extra_keys = [list(named) or None for _ in hashes]
        if parent is None and cache_salt:
            extra_keys[0] = [*named, cache_salt]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=adapter or None,
        extra_keys=extra_keys,
        group_idx=group,
        kv_cache_spec_kind=KINDS[group],
        cache_salt=cache_salt or None,
        has_logits=has_logits,
    )
