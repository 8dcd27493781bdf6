"""A short name for what computes an engine's answers: with equal ones and --batch-invariant, equal
requests have answers of equal bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any


class Fingerprint:
    """`parts`: JSON objects: device, versions, mode and model. `short`: their name."""

    def __init__(
        self, parts: Mapping[str, Any] | None = None, weights: Callable[[], str] | None = None
    ) -> None:
        """weights: computes the digest that becomes a part of the model; None: there is none."""
        self.parts: dict[str, Any] = json.loads(json.dumps(parts or {}))  # plain types: it is sent
        self._weights = weights
        self.renew()

    def renew(self) -> None:
        """The weights have changed. All ranks call it."""
        if self._weights is not None:
            model = self.parts.get("model", {})
            self.parts["model"] = {**model, "weights": self._weights()}
        canonical = json.dumps(self.parts, sort_keys=True, separators=(",", ":"))
        self.short = f"fp_{sha256(canonical.encode()).hexdigest()[:16]}"

    def describe(self) -> str:
        """For the log, in one line."""
        parts = (f"{name}: {_in_words(part)}" for name, part in self.parts.items())
        return f"system fingerprint {self.short}: {'; '.join(parts)}"


def _in_words(part: Any) -> str:
    """Without what is off or left out."""
    if not isinstance(part, Mapping):
        return str(part)
    return ", ".join(
        f"{name} {value[:16] if isinstance(value, str) and len(value) == 64 else value}"
        for name, value in part.items()
        if value is not None and value is not False
    )
