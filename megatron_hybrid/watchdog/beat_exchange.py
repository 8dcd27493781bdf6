"""The beat thread: once a second this rank's beat into torchrun's store, everybody's out of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from megatron_hybrid.rank_layout import RankLayout
from megatron_hybrid.watchdog.rank_beat import RankBeat

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # for the store to take last words, and to say what the last words were
START_TIMEOUT = timedelta(minutes=30)  # as torch's process groups have it
VERDICT, NO_VERDICT = "verdict", "-"
StoreFactory = Callable[[], "dist.Store"]
T = TypeVar("T")


@dataclass(eq=False)
class BeatExchange:
    """Hands this rank's beat to the others and theirs to us, while `run` runs in a thread.

    A thread of its own, because a store whose machine is gone may never answer.
    """

    open_store: StoreFactory
    size: int  # ranks
    own: Callable[[], RankBeat]  # called for this rank's beat, each time it is sent
    wake: Callable[[], None]  # called when there is a verdict
    verdict: str | None = None  # why the group has to end: whoever found out first says it
    answered: float = field(default_factory=time.monotonic)  # when the store did last
    _store: dist.Store | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    # read, and not taken yet
    _beats: deque[list[RankBeat | None]] = field(default_factory=lambda: deque(maxlen=1))

    def run(self) -> None:
        """Until `leave`."""
        told = False
        while not self._ended.is_set():
            try:
                if self._store is None:
                    self._store = self.open_store()
                    self._store.compare_set(VERDICT, "", NO_VERDICT)
                self._publish(self._store)
                self._note(self._read(self._store), self._store.get(VERDICT).decode())
                told = False
            except Exception as error:  # the watchdog minds for how long this goes on
                self._store = None
                if not told and not self._ended.is_set():
                    logger.warning("torchrun's store does not answer the watchdog: %s", error)
                told = True
            self._ended.wait(BEAT_SECONDS)

    def take(self) -> list[RankBeat | None] | None:
        """Everybody's beats, in the order of the ranks, None for one who has not sent any; None
        if there is nothing new since the last call."""
        return self._beats.pop() if self._beats else None

    def read_now(self) -> list[RankBeat | None] | None:
        """Everybody's latest beats; None if the store does not say."""
        store = self._store
        return None if store is None else _within(ANSWER_SECONDS, lambda: self._read(store))

    def judge(self, message: str) -> str:
        """Say why the group has to end; the answer is what holds, which may be another rank's
        reason that came first."""
        if (store := self._store) is None:
            return message
        said = _within(ANSWER_SECONDS, lambda: store.compare_set(VERDICT, NO_VERDICT, message))
        return message if said is None else said.decode()

    def leave(self) -> None:
        """Send the last beat, and no more."""
        self._ended.set()
        if (store := self._store) is not None:
            _within(ANSWER_SECONDS, lambda: self._publish(store))

    def _publish(self, store: dist.Store) -> None:
        beat = self.own()
        store.set(_key(beat.rank), msgspec.json.encode(beat).decode())

    def _read(self, store: dist.Store) -> list[RankBeat | None]:
        """Everybody's beats. torch's store would wait for those that are not there yet."""
        keys = [_key(rank) for rank in range(self.size)]
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        found: list[RankBeat | None] = [None] * self.size
        for value in store.multi_get(keys):
            beat = msgspec.json.decode(value, type=RankBeat)
            found[beat.rank] = beat
        return found

    def _note(self, beats: list[RankBeat | None], verdict: str) -> None:
        self._beats.append(beats)
        self.answered = time.monotonic()
        if verdict != NO_VERDICT:
            self.verdict = verdict
            self.wake()


def store_of_group(layout: RankLayout, timeout: timedelta) -> StoreFactory:
    """Opens connections of their own to torchrun's store, under a prefix that the ranks of the
    lockstep group have for this start of theirs. Waits until all of them are here. A rank that has
    no others need not ask torchrun's."""
    import torch.distributed as dist

    if layout.sizes.lockstep_group == 1:
        own = dist.HashStore()
        return lambda: own

    from megatron_hybrid.parallel.fresh_store import fresh_prefix

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, prefix = fresh_prefix(layout, "watchdog", START_TIMEOUT)

    def open_store() -> dist.Store:
        _ = store  # to keep it: rank 0's is the server, where torchrun's agent is not
        tcp = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(prefix, tcp)

    return open_store


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What a call to the store gives; None if it fails, or takes longer."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
