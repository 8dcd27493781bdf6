"""WeightCheck: are the weights that a trainer has brought those that were there before? For
SGLang's /weights_checker, by which slime tries out its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_hybrid.errors import SleepError, WeightsError

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine


class WeightCheck:
    """Of one engine, between two steps. All ranks make the same calls."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._snapshot: str | None = None
        self._actions: dict[str, Callable[[], dict[str, Any]]] = {
            "checksum": self._checksum,
            "snapshot": self._remember,
            "compare": self._compare,
            "reset_tensors": self._reset,
        }

    def run(self, action: str) -> dict[str, Any]:
        """`checksum`: a digest of every bit of all weights; "snapshot" remembers it, and "compare"
        raises WeightsError unless it is the same now. "reset_tensors": the weights are given up:
        nothing is computed until an update has brought them all. Raises SleepError where weights
        sleep, or memory can't be given back."""
        return self._actions[action]()

    def _checksum(self) -> dict[str, Any]:
        engine = self._engine
        if engine.weights.is_open:
            raise WeightsError("The weights are being updated: finish that first.")
        if "weights" in engine.sleeping:
            raise SleepError("The weights sleep, and can't be read: wake them up first.")
        fingerprint = engine.weights.fingerprint
        fingerprint.renew()
        return {"checksum": fingerprint.parts["model"]["weights"]}

    def _remember(self) -> dict[str, Any]:
        found = self._checksum()
        self._snapshot = found["checksum"]
        return found

    def _compare(self) -> dict[str, Any]:
        if self._snapshot is None:
            raise WeightsError("There is no snapshot to compare the weights with: take one first.")
        found = self._checksum()
        if found["checksum"] != self._snapshot:
            raise WeightsError(
                f"The weights differ from the snapshot: their digest is {found['checksum']}, and "
                f"was {self._snapshot}."
            )
        return found

    def _reset(self) -> dict[str, Any]:
        self._engine.sleep(("weights",), keep_weights=False)
        self._engine.wake_up(("weights",))
        return {}
