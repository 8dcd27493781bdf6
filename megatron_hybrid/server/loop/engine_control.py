"""Pausing the engine and changing its weights, from inside the engine process's loop.

A pause, and an update of the weights, is answered when what runs has come to rest; until then the
loop goes on serving streams and queries. All that is decided here follows from the commands and
from the engine's state, so every rank decides alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_hybrid.errors import InvalidRequestError, RequestError, SleepError, WeightsError
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.loop.weight_check import WeightCheck
from megatron_hybrid.weight_transfer.requests import FromFolder, FromGroup, FromPrime

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine
    from megatron_hybrid.weight_transfer.transfers import WeightTransfers

logger = logging.getLogger(__name__)


class _Conflict(RequestError):
    """What is asked for does not go with what was asked before."""

    status = 409


@dataclass(slots=True)
class _Job:
    """What waits for the engine to come to rest."""

    client: bytes
    query: wire.ControlQuery
    was_paused: bool


@dataclass(eq=False)
class EngineControl:
    """`send` gives a client its reply; `tell_of_weights` tells all that they have changed. In a
    lockstep group every replica is asked for a job, and they do it together."""

    engine: DynamicInferenceEngine
    send: Callable[[bytes, wire.Reply], None]
    tell_of_weights: Callable[[], None] = lambda: None
    tell_of_adapters: Callable[[], None] = lambda: None
    _pauses: list[tuple[bytes, wire.Pause]] = field(default_factory=list)  # not answered yet
    _job: _Job | None = None
    _goes_on: bool = False  # when the update in several pieces is finished
    _check: WeightCheck = field(init=False)

    def __post_init__(self) -> None:
        self._check = WeightCheck(self.engine)

    def take(self, client: bytes, query: wire.ControlQuery) -> None:
        """Begin what the query asks for. Some answers come with `proceed`."""
        try:
            match query:
                case wire.Pause():
                    self._pause(client, query)
                case wire.Resume():
                    self._resume(client, query)
                case _:
                    self._await_rest(client, query)
        except RequestError as error:
            self._refuse(client, query, str(error), error.status)

    def proceed(self) -> None:
        """To be called in every turn of the loop: do and answer what waited for the engine to come
        to rest, if it has."""
        if not (self._pauses or self._job) or not self.engine.is_quiet:
            return
        for client, query in self._pauses:
            self._succeed(client, query)
        self._pauses.clear()
        if self._job is not None and self._others_are_at_rest():
            job, self._job = self._job, None
            self._do(job)

    def _others_are_at_rest(self) -> bool:
        """Whether every replica in lockstep waits to do its job, as this one does from now on; all
        learn it in the same turn."""
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
        if self._job is not None:
            self._job.was_paused = True
        self._goes_on = False

    def _resume(self, client: bytes, query: wire.Resume) -> None:
        if self._job is not None:
            raise _Conflict(
                "New weights wait for running requests to end: resume when they are in place."
            )
        if self.engine.weights.is_open:
            raise _Conflict("The weights are being updated: finish that first.")
        self.engine.resume()
        for waiting, pause in self._pauses:
            message = "The engine was resumed before it had come to rest."
            self._refuse(waiting, pause, message, _Conflict.status)
        self._pauses.clear()
        self.tell_of_weights()  # which may have got a new name just now
        self._succeed(client, query)

    def _await_rest(self, client: bytes, query: wire.ControlQuery) -> None:
        if self._job is not None:
            raise _Conflict(f"{_words(self._job.query)} are being waited for already.")
        was_paused = self.engine.pause_mode is not None
        # What has no mode, such as groups that come and go, is done between two steps.
        mode, usual = getattr(query, "mode", ""), "finish" if hasattr(query, "mode") else "keep"
        if mode or not was_paused:
            self.engine.pause(mode or usual)
        self._job = _Job(client, query, was_paused)

    def _do(self, job: _Job) -> None:
        client, query, engine = job.client, job.query, self.engine
        was_open, epoch = engine.weights.is_open, engine.epoch
        logger.info("%s.", _words(query))
        try:
            try:
                values = self._done(query)
            finally:  # before the answer: whoever has it finds the engine as it was
                self._go_on(job, was_open)
        except WeightsError as error:
            logger.warning("%s: it was refused: %s", _words(query), error)
            self._refuse(client, query, str(error), 400)
        except (SleepError, RequestError) as error:
            status = getattr(error, "status", _Conflict.status)
            self._refuse(client, query, str(error), status)
        except Exception as error:  # the engine's next step says whether it can go on
            logger.exception("%s: it failed.", _words(query))
            self._refuse(client, query, str(error), 500)
        else:
            if engine.epoch != epoch:
                name = engine.weights.fingerprint.short
                logger.info("New weights are in place: epoch %d, %s.", engine.epoch, name)
            if isinstance(query, wire.AdapterQuery):
                self.tell_of_adapters()
            else:
                self.tell_of_weights()
            self._succeed(client, query, values)

    def _done(self, query: wire.ControlQuery) -> dict[str, Any]:
        """Do it; what else the answer says."""
        weights = self.engine.weights
        match query:
            case wire.UpdateWeights(source=FromFolder(path)):
                self.engine.update_weights(path, query.version)
            case wire.UpdateWeights():
                self.engine.come_to_rest()
                weights.update_from(self._transfers().sources(query.source), query.version)
            case wire.BeginUpdate():
                self.engine.come_to_rest()
                weights.begin()
            case wire.NameWeights(version=version):
                weights.call(version)
            case wire.FinishUpdate():
                if not weights.is_open:
                    raise WeightsError("No update in several pieces has begun.")
                weights.finish(query.version)
            case wire.Sleep(tags=tags):
                self.engine.sleep(tags, query.keep_weights)
            case wire.WakeUp(tags=tags):
                self.engine.wake_up(tags)
            case wire.CheckWeights(action=action):
                self.engine.come_to_rest()
                return self._check.run(action)
            case wire.LoadAdapter(name=name):
                self._load_adapter(query)
                return {"adapters": self.engine.adapter_folders}
            case wire.UnloadAdapter(name=name):
                self.engine.unload_adapter(name)
                return {"adapters": self.engine.adapter_folders}
            case wire.OpenGroup():
                self._transfers().open(query.group)
            case wire.CloseGroup():
                return {"closed": self._transfers().close(query.name)}
        return {}

    def _load_adapter(self, query: wire.LoadAdapter) -> None:
        if query.name in self.engine.adapters and not query.in_place:
            raise InvalidRequestError(
                "lora_name",
                f"Adapter {query.name!r} is loaded already; load_inplace gives it new weights.",
            )
        source: Any
        if isinstance(query.source, FromFolder):
            source = query.source.path
        else:
            source = self._transfers().all_of(query.source)
        self.engine.load_adapter(query.name, source, query.config)

    def _go_on(self, job: _Job, was_open: bool) -> None:
        """As it was before, unless an update has begun of which more pieces come."""
        is_open = self.engine.weights.is_open
        if is_open and not was_open:
            self._goes_on = not job.was_paused
        elif was_open and not is_open and self._goes_on or not is_open and not job.was_paused:
            self.engine.resume()

    def _transfers(self) -> WeightTransfers:
        transfers = self.engine.weights.transfers
        assert transfers is not None, "of whoever builds the engine"
        return transfers

    def _succeed(
        self, client: bytes, query: wire.Query, values: dict[str, Any] | None = None
    ) -> None:
        now = {"epoch": self.engine.epoch, "weight_version": self.engine.weights.version}
        self.send(client, wire.Result(query.query_id, {**now, **(values or {})}))

    def _refuse(self, client: bytes, query: wire.Query, message: str, status: int) -> None:
        self.send(client, wire.Result(query.query_id, error=message, status=status))


def _words(query: wire.ControlQuery) -> str:
    """What it is about, for the log and for who comes too early."""
    match query:
        case wire.UpdateWeights(source=FromFolder(path)):
            return f"New weights from {path}"
        case wire.UpdateWeights(source=FromGroup(group) | FromPrime(group)):
            return f"New weights from group {group!r}"
        case wire.UpdateWeights():
            return "New weights from other processes' memory"
        case wire.LoadAdapter(name=name) | wire.UnloadAdapter(name=name):
            return f"Requests for adapter {name!r}"
        case wire.Sleep() | wire.WakeUp():
            return "The device's memory and its tenants"
        case wire.CheckWeights(action=action):
            return f"The weights, for {action},"
        case wire.OpenGroup(group=group):
            return f"The members of group {group.name!r}"
        case wire.CloseGroup(name=name):
            return f"The last words of group {name!r}"
    return "Pieces of an update of the weights"
