"""What goes out is what vLLM's own structs decode, and what other routers' decoders expect."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS, LOGITS, STATES, CacheChanges
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kv_events import (
    EventBatch,
    KVEventsConfig,
    encode_batch,
    wire_hash,
)
from megatron_hybrid.kv_events.messages import events_of
from megatron_hybrid.server import cli
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.loop.engine_loop import EngineLoop

B = 4
HYBRID = CacheGeometry(B, B, 100, 4, 4, bytes_per_block=1, bytes_per_state=1)
ATTENTION = CacheGeometry(B, 1, 100, 4, 4, bytes_per_block=1, bytes_per_state=0)
TOKENS = np.arange(10, 24, dtype=np.int32)


# As docs.vllm.ai shows vllm.distributed.kv_events, with the fields of version 0.26.
class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class TheirEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(TheirEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(TheirEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(TheirEvent):
    pass


class TheirKVEventBatch(TheirBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def keys_of(salt: str = "", adapter: str = "") -> SequenceKeys:
    keys = SequenceKeys(
        root_key(0, salt, adapter),
        B,
        lambda start, end: TOKENS[start:end],
        cache_salt=salt,
        adapter=adapter,
    )
    keys.extend_to(len(TOKENS))
    return keys


def sent(changes: CacheChanges) -> bytes:
    return encode_batch(EventBatch(12.5, events_of(changes.take()), 3))


def theirs(changes: CacheChanges) -> list[Any]:
    batch = msgspec.msgpack.decode(sent(changes), type=TheirKVEventBatch)
    assert batch.ts == 12.5 and batch.data_parallel_rank == 3
    return batch.events


def test_blocks_and_states_of_a_hybrid_model_as_vllm_decodes_them():
    changes, keys = CacheChanges(HYBRID), keys_of()
    changes.blocks_stored(keys, 0, 3)
    changes.state_stored(keys, 12, False)  # at a block's end
    changes.state_stored(keys, 14, True)  # two tokens into the next one
    a, b, c = (wire_hash(key) for key in keys.blocks)
    end = wire_hash(keys.at(14))
    assert theirs(changes) == [
        AllBlocksCleared(),
        BlockStored(
            [a, b, c], None, list(range(10, 22)), 4, None, "GPU", None,
            group_idx=0, kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            [c], b, [18, 19, 20, 21], 4, None, "GPU", None, group_idx=1, kv_cache_spec_kind="mamba"
        ),
        BlockStored(
            [end], c, [22, 23], 2, None, "GPU", None, group_idx=1, kv_cache_spec_kind="mamba"
        ),
    ]  # fmt: skip


def test_what_goes_first_is_removed_first_and_neighbours_share_an_event():
    changes, keys = CacheChanges(HYBRID), keys_of()
    changes.take()
    changes.removed(keys.at(14), STATES)
    for key in reversed(keys.blocks):
        changes.removed(key, BLOCKS)
    changes.blocks_stored(keys, 0, 1)
    changes.removed(keys.blocks[0], BLOCKS)
    a, b, c = (wire_hash(key) for key in keys.blocks)
    events = theirs(changes)
    assert events[0] == BlockRemoved([wire_hash(keys.at(14))], "GPU", 1)
    assert events[1] == BlockRemoved([c, b, a], "GPU", 0)
    assert events[2].block_hashes == [a] and events[3] == BlockRemoved([a], "GPU", 0)


def test_a_run_that_goes_on_names_its_parent():
    changes, keys = CacheChanges(HYBRID), keys_of()
    changes.take()
    changes.blocks_stored(keys, 1, 3)
    a, b, c = (wire_hash(key) for key in keys.blocks)
    (event,) = theirs(changes)
    assert (event.parent_block_hash, event.block_hashes) == (a, [b, c])
    assert event.token_ids == list(range(14, 22))


def test_salt_and_adapter_come_as_vllm_has_them():
    """The salt in the first block's extra keys, the adapter in all of them and by name."""
    changes, keys = CacheChanges(HYBRID), keys_of("tenant", "tuned")
    changes.take()
    changes.blocks_stored(keys, 0, 2)
    changes.blocks_stored(keys, 2, 3)
    first, second = theirs(changes)
    assert first.extra_keys == [("tuned", "tenant"), ("tuned",)]
    assert second.extra_keys == [("tuned",)]
    assert first.lora_name == second.lora_name == "tuned" and first.lora_id is None
    changes.blocks_stored(keys_of("tenant"), 0, 2)
    (event,) = theirs(changes)
    assert event.extra_keys == [("tenant",), None] and event.lora_name is None


def test_the_same_tokens_under_another_salt_have_other_hashes():
    hashes = {wire_hash(keys_of(salt).blocks[0]) for salt in ("", "a", "b")}
    assert len(hashes) == 3
    assert all(0 <= name < 2**64 for name in hashes)


def test_the_bytes_are_an_array_of_maps():
    """Routers decode the outer array and the inner maps by themselves."""
    changes, keys = CacheChanges(HYBRID, epoch=2), keys_of("tenant")
    changes.blocks_stored(keys, 0, 1)
    changes.state_stored(keys, 4, True)
    changes.removed(keys.at(4), LOGITS)
    ts, events, rank = msgspec.msgpack.decode(sent(changes))
    name = wire_hash(keys.blocks[0])
    required = {
        "type": "BlockStored", "block_hashes": [name], "parent_block_hash": None,
        "token_ids": [10, 11, 12, 13], "block_size": 4, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [["tenant"]], "cache_salt": "tenant",
    }  # fmt: skip
    assert (ts, rank) == (12.5, 3)
    assert events == [
        {"type": "AllBlocksCleared", "epoch": 2, "block_size": 4, "has_recurrent": True},
        required | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
        required | {"group_idx": 1, "kv_cache_spec_kind": "mamba", "has_logits": True},
        {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 2},
    ]


def test_an_exact_end_without_recurrent_layers_is_no_attention_block():
    """Routers leave the kind alone, and a group that they have not seen may be one of theirs."""
    changes = CacheChanges(ATTENTION)
    changes.take()
    changes.state_stored(keys_of(), 14, False)
    (event,) = theirs(changes)
    assert (event.group_idx, event.kv_cache_spec_kind, event.block_size) == (1, "mamba", 2)


def test_nothing_changed_is_nothing_to_send():
    changes = CacheChanges(HYBRID)
    assert changes.take()
    assert changes.take() == []


def test_the_configuration_has_vllms_names():
    config = KVEventsConfig.from_json(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",'
        ' "replay_endpoint": "tcp://*:5600", "buffer_steps": 10, "hwm": 20, "max_queue_size": 30,'
        ' "topic": "kv@pod@model"}'
    )
    assert config.enabled and config.topic == "kv@pod@model"
    assert [config.endpoint_of(k) for k in (0, 2)] == ["tcp://*:5557", "tcp://*:5559"]
    assert [config.replay_endpoint_of(k) for k in (0, 2)] == ["tcp://*:5600", "tcp://*:5602"]
    assert KVEventsConfig(endpoint="ipc:///tmp/x").endpoint_of(1) == "ipc:///tmp/x_dp1"
    assert not KVEventsConfig.from_json("{}").enabled
    assert not KVEventsConfig.from_json(
        '{"enable_kv_cache_events": true, "publisher": "null"}'
    ).enabled


@pytest.mark.parametrize(
    "text, said",
    [
        ("not json", "not a JSON object"),
        ('{"enable": true}', "unknown field `enable`"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"endpoint": "http://x"}', "endpoint is 'http://x'"),
        ('{"replay_endpoint": "x"}', "replay_endpoint is 'x'"),
        ('{"buffer_steps": 0}', "buffer_steps is 0"),
    ],
)
def test_another_configuration_is_refused_with_a_reason(text: str, said: str):
    with pytest.raises(ConfigurationError, match="--kv-events-config") as refused:
        KVEventsConfig.from_json(text)
    assert said in str(refused.value)


def test_the_server_refuses_it_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--kv-events-config", '{"endpoint": 7}']) == 2
    assert "--kv-events-config" in capsys.readouterr().err


class OneStep:
    """An engine that has one step to do."""

    lockstep = None

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def has_work(self) -> bool:
        return not self.order

    def step(self) -> list[Any]:
        self.order.append("step")
        return []

    def use_idle_time(self) -> bool:
        return False


def test_a_turn_of_the_engines_loop_publishes_what_its_step_and_commands_changed():
    order: list[str] = []
    turns = iter([[], [wire.Stop()]])
    loop = EngineLoop(
        OneStep(order),  # type: ignore[arg-type]
        None,
        broadcast=lambda commands: next(turns),
        publish_cache=lambda: order.append("publish"),
    )
    assert loop.run() == 0
    assert order == ["step", "publish", "publish"]


def test_replicas_need_ports_to_count_on():
    with pytest.raises(ConfigurationError, match="no port"):
        KVEventsConfig(endpoint="tcp://host").endpoint_of(1)
