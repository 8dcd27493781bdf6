"""Pausing the engine and changing its weights, from inside the engine process's loop.

A pause, and an update of the weights, is answered when what runs has come to rest; until then the
loop goes on serving streams and queries. All that is decided here follows from the commands and
from the engine's state, so every rank decides alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_hybrid.errors import RequestError, WeightsError
from megatron_hybrid.server.link import messages as wire

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine

logger = logging.getLogger(__name__)

ControlQuery = wire.Pause | wire.Resume | wire.UpdateWeights


class _Conflict(RequestError):
    """What is asked for does not go with what was asked before."""

    status = 409


@dataclass(slots=True)
class _Update:
    """An update that waits for the engine to come to rest."""

    client: bytes
    query: wire.UpdateWeights
    stays_paused: bool


@dataclass(eq=False)
class EngineControl:
    """`send` gives a client its reply; `tell_of_weights` tells all that they have changed. In a
    lockstep group every replica is asked for an update, and they load the weights together."""

    engine: DynamicInferenceEngine
    send: Callable[[bytes, wire.Reply], None]
    tell_of_weights: Callable[[], None] = lambda: None
    _pauses: list[tuple[bytes, wire.Pause]] = field(default_factory=list)  # not answered yet
    _update: _Update | None = None

    def take(self, client: bytes, query: ControlQuery) -> None:
        """Begin what the query asks for. Some answers come with `proceed`."""
        try:
            match query:
                case wire.Pause():
                    self._pause(client, query)
                case wire.Resume():
                    self._resume(client, query)
                case wire.UpdateWeights():
                    self._begin_update(client, query)
        except RequestError as error:
            self._refuse(client, query, str(error), error.status)

    def proceed(self) -> None:
        """To be called in every turn of the loop: do and answer what waited for the engine to come
        to rest, if it has."""
        if not (self._pauses or self._update) or not self.engine.is_quiet:
            return
        for client, query in self._pauses:
            self._succeed(client, query)
        self._pauses.clear()
        if self._update is not None and self._others_are_at_rest():
            update, self._update = self._update, None
            self._load(update)

    def _others_are_at_rest(self) -> bool:
        """Whether every replica in lockstep waits to load weights, as this one does from now on;
        all learn it in the same turn."""
        lockstep = self.engine.lockstep
        if lockstep is None:
            return True
        if not lockstep.all_at_rest:
            lockstep.is_at_rest = True
            return False
        lockstep.is_at_rest = lockstep.all_at_rest = False
        return True

    def _pause(self, client: bytes, query: wire.Pause) -> None:
        self.engine.pause(query.mode)
        self._pauses.append((client, query))
        if self._update is not None:
            self._update.stays_paused = True

    def _resume(self, client: bytes, query: wire.Resume) -> None:
        if self._update is not None:
            raise _Conflict(
                "New weights wait for running requests to end: resume when they are in place."
            )
        self.engine.resume()
        for waiting, pause in self._pauses:
            message = "The engine was resumed before it had come to rest."
            self._refuse(waiting, pause, message, _Conflict.status)
        self._pauses.clear()
        self._succeed(client, query)

    def _begin_update(self, client: bytes, query: wire.UpdateWeights) -> None:
        if self._update is not None:
            raise _Conflict(
                f"New weights from {self._update.query.folder} are being waited for already."
            )
        was_paused = self.engine.is_paused
        if query.mode or not was_paused:
            self.engine.pause(query.mode or "finish")
        self._update = _Update(client, query, stays_paused=was_paused)

    def _load(self, update: _Update) -> None:
        client, query, engine = update.client, update.query, self.engine
        logger.info("Reading new weights from %s.", query.folder)
        try:
            try:
                engine.update_weights(query.folder)
            finally:  # before the answer: whoever has it finds the engine as it was
                if not update.stays_paused:
                    engine.resume()
        except WeightsError as error:
            logger.warning("The weights were not changed: %s", error)
            self._refuse(client, query, str(error), 400)
        except Exception as error:  # the engine's next step says whether it can go on
            logger.exception("New weights could not be put in place.")
            self._refuse(client, query, str(error), 500)
        else:
            name = engine.weights.fingerprint.short
            logger.info("New weights are in place: epoch %d, %s.", engine.epoch, name)
            self.tell_of_weights()
            self._succeed(client, query)

    def _succeed(self, client: bytes, query: wire.Query) -> None:
        self.send(client, wire.Result(query.query_id, {"epoch": self.engine.epoch}))

    def _refuse(self, client: bytes, query: wire.Query, message: str, status: int) -> None:
        self.send(client, wire.Result(query.query_id, error=message, status=status))
