"""EngineWeights: what an engine computes with, and how it changes between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.fingerprint import Fingerprint
from megatron_hybrid.engine.latency import SECONDS, Clock, Histogram
from megatron_hybrid.errors import WeightsError, WeightsLostError
from megatron_hybrid.execution.plan import Runner, WeightsSource
from megatron_hybrid.weight_transfer.transfers import WeightTransfers


class EngineWeights:
    """All ranks make the same calls, with nothing in flight.

    An update is one `put` or several between `begin` and `finish`; until then no step may run.
    """

    def __init__(self, runner: Runner, context: DynamicInferenceContext, clock: Clock) -> None:
        # Of whoever builds the engine.
        self.fingerprint = Fingerprint()
        self.transfers: WeightTransfers | None = None
        # Called with the names of those that an update, or a piece of one, leaves as they are.
        self.on_put: Callable[[frozenset[str]], None] = lambda left_out: None
        self.is_open = False  # between `begin` and `finish`
        self._runner, self._context = runner, context
        self._lost: str | None = None  # why nothing can be computed any more
        self._is_renamed = True  # the fingerprint is that of what is there
        self._clock = clock
        self._began = 0.0  # the update that is open, or the last one
        self._outcomes = {"done": 0, "refused": 0, "lost": 0}  # of updates, or of their pieces
        self._seconds = Histogram(SECONDS)  # from the beginning of an update to its end

    @property
    def version(self) -> str:
        """What answers call them: as whoever sent them said, else the epoch."""
        return self._context.weight_version

    def call(self, version: str) -> None:
        """What answers call the weights from now on."""
        self._context.weight_version = version

    @property
    def are_lost(self) -> bool:
        """Whether a part of an update was copied and the rest was not."""
        return self._lost is not None

    def check(self) -> None:
        """Raise WeightsLostError, and WeightsError within an update, unless a step can run."""
        if self._lost is not None:
            raise WeightsLostError(self._lost)
        if self.is_open:
            raise WeightsError("The weights are being updated: finish that first.")

    def begin(self) -> None:
        """An update comes; begun already, it goes on. Raises WeightsLostError."""
        if self._lost is not None:
            raise WeightsLostError(self._lost)
        if not self.is_open:
            self._began = self._clock()
        self.is_open = True

    def put(self, source: WeightsSource) -> None:
        """Overwrite what `source` holds. Raises WeightsError, without any effect, for weights that
        do not fit; after any other error nothing can be computed any more."""
        try:
            self.on_put(self._runner.update_weights(source))
        except WeightsError:
            raise
        except BaseException as error:  # interrupted: nobody knows how far it came
            self._lose(str(error) or type(error).__name__)
            raise

    def finish(self, version: str | None = None) -> None:
        """All is in place: nothing that was cached is found any more. `version`: what answers call
        the weights from now on; None: their epoch."""
        self.is_open = False
        cache = self._context.cache
        cache.set_epoch(cache.epoch + 1)
        self._context.weight_version = str(cache.epoch) if version is None else version
        self._is_renamed = False
        self._outcomes["done"] += 1
        self._seconds.observe(self._clock() - self._began)

    def update(self, source: WeightsSource, version: str | None = None) -> None:
        """All of it. A `source` that does not fit leaves everything as it was."""
        self.update_from([source], version)

    def update_from(self, sources: Iterable[WeightsSource], version: str | None = None) -> None:
        """The same in pieces, of which each is known when the ones before are in place. Within an
        update that has begun it is a part of that, and does not finish it."""
        was_open = self.is_open
        self.begin()
        pieces = 0
        try:
            for source in sources:
                self.put(source)
                pieces += 1
        except BaseException as error:  # of what gives the pieces, too
            self.is_open = was_open
            if pieces and self._lost is None:
                words = f"Of an update {pieces} pieces are in place, the next one is not: {error}"
                self._lose(words)
                raise WeightsLostError(words) from error
            if self._lost is None:
                self._outcomes["refused"] += 1
            raise
        if not was_open:
            self.finish(version)

    def rename(self) -> None:
        """Have the fingerprint say what is there. Apart, since it reads all weights: an update that
        comes in many pieces needs it once."""
        if not self._is_renamed:
            self.fingerprint.renew()
            self._is_renamed = True

    def stats(self) -> dict[str, Any]:
        """What is there, and what updates took; see docs/server_metrics.md."""
        return {
            "epoch": self._context.cache.epoch,
            "weight_version": self.version,
            "weight_updates": dict(self._outcomes),
            "weight_update_seconds": self._seconds.as_dict(),
        }

    def _lose(self, why: str) -> None:
        self._lost = why
        self._outcomes["lost"] += 1
