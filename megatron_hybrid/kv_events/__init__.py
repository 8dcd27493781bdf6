"""KV events: what a replica's prefix cache holds, told to routers in vLLM's ZMQ format.

No torch in here, and no server: a router needs no more than this package and `cache/block_hash.py`.

    engine process                              a router (ours: the coordinator)
    cache --> CacheChanges                      KVEventSubscriber --events--> CacheContents
                   | take(), each step                ^       ^                  skippable()
                       KVEventPublisher ===PUB====SUB=+       |
                            (a thread)  ===ROUTER=====DEALER==+  replay, or a snapshot

The engine's side:

    changes = engine.cache_changes()             # before the first request
    publisher = KVEventPublisher(
        ["ipc://.../kv-events-0"], ["ipc://.../kv-replay-0"], KVEventsConfig()
    )
    publisher.publish(changes.take())            # after each step; never waits

A router's side, one for each replica:

    subscriber = KVEventSubscriber("ipc://.../kv-events-0", "ipc://.../kv-replay-0")
    subscriber.receive()                         # often; reads what is there, never waits
    if subscriber.is_current:                    # nothing was missed, and it was heard of just now
        contents = subscriber.contents
        root = root_key(contents.epoch, cache_salt, adapter, contents.stored_as)
        keys = SequenceKeys(root, contents.block_size, lambda start, end: tokens[start:end])
        contents.skippable(keys, len(tokens))    # tokens that this prompt need not compute there

(`tokens` is an int32 array, `root_key` and `SequenceKeys` are in `cache/block_hash.py`. The keys of
one prompt serve for all replicas of the same epoch that store KV in the same type.)

A KVEventSubscriber asks for what it missed by itself: at first, after a gap, and when the engine
was restarted. The events and replays, and what they mean for hybrid models: docs/routing.md.
"""

from megatron_hybrid.kv_events.config import KVEventsConfig
from megatron_hybrid.kv_events.contents import CacheContents
from megatron_hybrid.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
    wire_hash,
)
from megatron_hybrid.kv_events.publisher import KVEventPublisher
from megatron_hybrid.kv_events.subscriber import KVEventSubscriber

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheContents",
    "EventBatch",
    "KVEventPublisher",
    "KVEventSubscriber",
    "KVEventsConfig",
    "decode_batch",
    "encode_batch",
    "wire_hash",
]
