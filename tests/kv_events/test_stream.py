"""Publisher and subscriber over real sockets: replay, snapshots, restarts, slow subscribers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from megatron_hybrid.cache.block_hash import SequenceKeys, root_key
from megatron_hybrid.cache.changes import BLOCKS, STATES, CacheChanges
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kv_events import (
    CacheContents,
    KVEventPublisher,
    KVEventsConfig,
    KVEventSubscriber,
    decode_batch,
    wire_hash,
)
from megatron_hybrid.kv_events.messages import AllBlocksCleared
from megatron_hybrid.kv_events.publisher import END_OF_REPLAY

B = 4
GEOMETRY = CacheGeometry(B, B, 1000, 8, 8, bytes_per_block=1, bytes_per_state=1)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


class Engine:
    """Publishes what a test says that its cache does."""

    def __init__(self, folder: Path, *, heartbeat_seconds: float = 0.1, **options: Any) -> None:
        self.endpoints = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        self.changes = CacheChanges(GEOMETRY)
        self.publisher = KVEventPublisher(
            self.endpoints[:1],
            self.endpoints[1:],
            KVEventsConfig(**options),
            heartbeat_seconds=heartbeat_seconds,
        )
        self.step()

    def step(self) -> None:
        self.publisher.publish(self.changes.take())

    def store(self, number: int, count: int = 2) -> list[int]:
        """Blocks of a sequence that begins like no other, in a step of their own."""
        tokens = np.full(count * B, number, dtype=np.int32)
        keys = SequenceKeys(root_key(0), B, lambda start, end: tokens[start:end])
        keys.extend_to(len(tokens))
        self.changes.blocks_stored(keys, 0, count)
        self.changes.state_stored(keys, len(tokens) - 1, False)
        self.step()
        return [wire_hash(key) for key in keys.blocks]

    def remove(self, number: int, count: int = 2) -> None:
        tokens = np.full(count * B, number, dtype=np.int32)
        keys = SequenceKeys(root_key(0), B, lambda start, end: tokens[start:end])
        self.changes.removed(keys.at(len(tokens) - 1), STATES)
        keys.extend_to(len(tokens))
        for key in reversed(keys.blocks):
            self.changes.removed(key, BLOCKS)
        self.step()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.publisher.close()


@pytest.fixture
def subscriber(engine: Engine) -> Iterator[KVEventSubscriber]:
    made = KVEventSubscriber(*engine.endpoints)
    yield made
    made.close()


def follow(subscriber: KVEventSubscriber, blocks: set[int]) -> None:
    def is_there() -> bool:
        subscriber.receive()
        return subscriber.is_current and subscriber.contents.blocks.keys() == blocks

    wait_until(is_there, f"{len(blocks)} blocks")


def test_a_subscriber_follows_what_is_stored_and_removed(
    engine: Engine, subscriber: KVEventSubscriber
):
    one, two = engine.store(1), engine.store(2, count=5)
    follow(subscriber, {*one, *two})
    assert len(subscriber.contents.states) == 2
    assert subscriber.contents.block_size == B and subscriber.contents.has_recurrent
    engine.remove(1)
    follow(subscriber, set(two))
    engine.changes.cleared(1)
    engine.step()
    follow(subscriber, set())
    assert subscriber.contents.epoch == 1 and not subscriber.contents.states


def test_a_subscriber_that_comes_late_gets_everything_that_is_still_there(engine: Engine):
    stored = {number: engine.store(number) for number in range(200)}
    for number in range(0, 200, 2):
        engine.remove(number)
    late = KVEventSubscriber(*engine.endpoints)
    follow(late, {name for number in range(1, 200, 2) for name in stored[number]})
    assert len(late.contents.states) == 100
    more = engine.store(1000)
    wait_until(lambda: late.receive() and more[0] in late.contents.blocks, "what came later")
    late.close()


def test_a_subscriber_that_was_there_before_the_publisher_gets_everything(tmp_path: Path):
    early = KVEventSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    early.receive()
    assert not early.is_current
    engine = Engine(tmp_path)
    follow(early, set(engine.store(1)))
    early.close()
    engine.publisher.close()


def test_a_subscriber_lives_through_restarts_of_the_publisher(tmp_path: Path):
    first = Engine(tmp_path)
    subscriber = KVEventSubscriber(*first.endpoints)
    follow(subscriber, set(first.store(1)))
    first.publisher.close()
    second = Engine(tmp_path)
    follow(subscriber, set(second.store(2)))
    subscriber.close()
    second.publisher.close()


@pytest.mark.parametrize("buffer_steps", [1, 10_000])
def test_batches_that_a_subscriber_lost_are_made_up_for(tmp_path: Path, buffer_steps: int):
    """From the buffer where they are in it, else by a snapshot."""
    engine = Engine(tmp_path, buffer_steps=buffer_steps)
    subscriber = KVEventSubscriber(*engine.endpoints)
    stored = engine.store(1)
    follow(subscriber, set(stored))
    subscriber._sub.unsubscribe(b"")
    time.sleep(0.1)
    stored += engine.store(2) + engine.store(3)
    engine.remove(1)
    time.sleep(0.3)
    subscriber._sub.subscribe(b"")
    follow(subscriber, set(stored[2:]))
    subscriber.close()
    engine.publisher.close()


def test_a_subscriber_that_does_not_read_holds_up_nobody(tmp_path: Path):
    """Publishing goes on, others get everything, and it catches up by itself."""
    engine = Engine(tmp_path, hwm=10)
    slow, other = (KVEventSubscriber(*engine.endpoints, hwm=hwm) for hwm in (1, 100_000))
    stored = engine.store(1)
    for subscriber in (slow, other):
        follow(subscriber, set(stored))
    started = time.monotonic()
    for number in range(2, 3000):
        stored += engine.store(number)
        if number % 100 == 0:
            other.receive()
    assert time.monotonic() - started < 10, "a step waited for a subscriber"
    follow(other, set(stored))
    asked = []
    ask = slow._ask
    slow._ask = lambda sequence: (asked.append(sequence), ask(sequence))  # type: ignore[func-returns-value, method-assign]
    follow(slow, set(stored))
    assert asked, "it lost nothing"
    for subscriber in (slow, other):
        subscriber.close()
    engine.publisher.close()


def test_a_publisher_that_is_gone_is_noticed(engine: Engine):
    now = [0.0]
    subscriber = KVEventSubscriber(*engine.endpoints, clock=lambda: now[0])
    one = engine.store(1)
    follow(subscriber, set(one))
    # The first may have come as a replay, before the subscription took effect: a heartbeat would be
    # missed in between, and asked for of a publisher that is gone. The second says that it did.
    follow(subscriber, {*one, *engine.store(2)})
    engine.publisher.close()
    wait_until(lambda: not subscriber.receive(), "silence")
    assert subscriber.is_current
    now[0] += 3.5
    assert not subscriber.is_current
    subscriber.close()


def test_a_replay_from_the_buffer_is_the_very_same_batches(tmp_path: Path):
    engine = Engine(tmp_path, heartbeat_seconds=60, topic="kv@pod@model")
    sub = zmq.Context.instance().socket(zmq.SUB)
    sub.connect(engine.endpoints[0])
    sub.subscribe(b"")
    seen: list[tuple[int, bytes]] = []

    def collect() -> bool:
        if not seen:
            engine.store(len(seen) + int(time.monotonic() * 1000) % 10_000)
        while sub.poll(10):
            topic, sequence, payload = sub.recv_multipart()
            assert topic == b"kv@pod@model" and len(sequence) == 8
            seen.append((int.from_bytes(sequence, "big"), payload))
        return len(seen) > 0

    wait_until(collect, "the first batch")
    for number in range(5):
        engine.store(20_000 + number)
    wait_until(lambda: collect() and len(seen) > 5, "all batches")
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(engine.endpoints[1])
    dealer.send_multipart((b"", seen[0][0].to_bytes(8, "big")))
    replayed = []
    while True:
        assert dealer.poll(20_000)
        empty, topic, sequence, payload = dealer.recv_multipart()
        assert empty == b"" and topic == (b"" if sequence == END_OF_REPLAY else b"kv@pod@model")
        if sequence == END_OF_REPLAY:
            break
        replayed.append((int.from_bytes(sequence, "big"), payload))
    assert payload == b""
    assert replayed == seen
    assert [number for number, _ in seen] == list(range(seen[0][0], seen[0][0] + len(seen)))
    for socket in (sub, dealer):
        socket.close(0)
    engine.publisher.close()


def test_a_snapshot_ends_with_the_number_of_the_last_batch(tmp_path: Path):
    """So whoever got it goes on with the next one; each part has a number of its own."""
    engine = Engine(tmp_path, buffer_steps=1, heartbeat_seconds=60)
    stored = {name for number in range(300) for name in engine.store(number)}
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(engine.endpoints[1])
    sequences: list[int] = []
    contents = CacheContents()

    def answer() -> bool:
        sequences.clear()
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            assert dealer.poll(20_000)
            _, _, sequence, payload = dealer.recv_multipart()
            if not payload:
                return contents.blocks.keys() == stored
            sequences.append(int.from_bytes(sequence, "big"))
            batch = decode_batch(payload)
            assert isinstance(batch.events[0], AllBlocksCleared) == (len(sequences) == 1)
            contents.apply(batch.events)

    wait_until(answer, "everything")
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert len(sequences) > 10
    assert sequences[-1] == engine.publisher._sequence - 1
    dealer.close(0)
    engine.publisher.close()


def test_a_broken_replay_request_is_ignored(engine: Engine, subscriber: KVEventSubscriber):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(engine.endpoints[1])
    dealer.send_multipart((b"", b"seven"))
    dealer.send(b"more")
    follow(subscriber, set(engine.store(1)))
    assert not dealer.poll(0)
    dealer.close(0)


def test_an_endpoint_that_is_taken_is_refused_with_its_name(engine: Engine):
    context = zmq.Context.instance()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigurationError, match=rf"tcp://0\.0\.0\.0:{port}.*--kv-events-config"):
        KVEventPublisher([f"tcp://0.0.0.0:{port}"], [], KVEventsConfig())
    taken.close(0)


def test_what_a_new_question_will_be_answered_with_is_not_kept(tmp_path: Path):
    now = 0.0
    replay = f"ipc://{tmp_path}/nobody"
    subscriber = KVEventSubscriber(f"ipc://{tmp_path}/events", replay, clock=lambda: now)
    for sequence in range(100):
        subscriber._take(sequence, b"")
    now = 10.0
    subscriber.receive()
    assert subscriber._waiting == []
    subscriber.close()
