"""The adapters that an engine has, by name, and the slots of the device that they lie in.

    load "a"         slot 1: a                        new requests for "a" use it
    load "a" again   slot 1: a, until its requests    slot 2: a, for new ones
                     have ended
    unload "a"       slot 2: until its requests       "a" is unknown
                     have ended

A request keeps the adapter that it began with: its cached tokens are that one's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid.errors import InvalidRequestError, WeightsError
from megatron_hybrid.execution.plan import Runner, WeightsSource
from megatron_hybrid.request import MAX_NAME_LENGTH
from megatron_hybrid.values import show, validate_text


class Adapter(NamedTuple):
    """`digest`: of its weights: what is cached under a name belongs to them. `folder`: where they
    were read; "": they came as tensors."""

    name: str = ""
    slot: int = 0
    digest: str = ""
    folder: str = ""

    @property
    def key(self) -> str:
        """What keys of cached prefixes depend on. Another process with the same adapter has the
        same one."""
        return f"{self.name}@{self.digest}" if self.digest else self.name


NO_ADAPTER = Adapter()


class Adapters:
    """All ranks make the same calls in the same order, and so choose the same slots."""

    def __init__(self, slots: int = 0) -> None:
        """`slots`: adapters that the device has room for; 0: --enable-lora is not given."""
        self.slots = slots
        # Answers that were asked of each, since its name is known.
        self.asked: dict[str, int] = {}
        self._by_name: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        """Those that requests may have."""
        return list(self._by_name)

    @property
    def folders(self) -> dict[str, str]:
        """Of each the folder that it was read from."""
        return {name: adapter.folder for name, adapter in self._by_name.items()}

    @property
    def keys(self) -> dict[str, str]:
        """Of each what keys of cached prefixes depend on."""
        return {name: adapter.key for name, adapter in self._by_name.items()}

    def find(self, name: str) -> Adapter:
        """Of a request; "" stands for none. Raises InvalidRequestError for an unknown name."""
        if not name:
            return NO_ADAPTER
        found = self._by_name.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def load(
        self,
        name: str,
        source: WeightsSource,
        config: Mapping[str, Any] | None,
        runner: Runner,
        in_use: Callable[[], set[int]],
    ) -> None:
        """See DynamicInferenceEngine.load_adapter. `in_use`: slots of requests that have not
        ended."""
        self._check_enabled()
        validate_text("adapter", name, MAX_NAME_LENGTH)
        if not name:
            raise InvalidRequestError("adapter", "An adapter needs a name.")
        used, old = in_use(), self._by_name.get(name)
        taken = self.taken(used)
        free = next((slot for slot in range(1, self.slots + 1) if slot not in taken), None)
        if free is None and old is not None and old.slot not in used:
            free = old.slot  # which nobody needs any more
        try:
            digest = runner.load_adapter(free, source, config)
        except WeightsError:
            if free is None:
                raise self._no_room(name) from None
            raise
        except BaseException:  # interrupted: nobody knows what is in the slot
            if old is not None and old.slot == free:
                self._forget(name)
            raise
        assert free is not None
        folder = str(source) if isinstance(source, str | Path) else ""
        self._by_name[name] = Adapter(name, free, digest, folder)
        self.asked.setdefault(name, 0)

    def unload(self, name: str) -> None:
        """See DynamicInferenceEngine.unload_adapter."""
        if name not in self._by_name:
            raise self._unknown(name)
        self._forget(name)

    def taken(self, in_use: set[int]) -> set[int]:
        """Slots of adapters that requests may have, and those in use."""
        return {own.slot for own in self._by_name.values()} | in_use

    def _forget(self, name: str) -> None:
        del self._by_name[name], self.asked[name]

    def _no_room(self, name: str) -> InvalidRequestError:
        return InvalidRequestError(
            "adapter",
            f"Adapter {show(name)} has no room: as many as --max-loras allows, {self.slots}, are "
            f"loaded ({self._known()}) or still used by requests that have not ended. Unload one, "
            "or start with a larger --max-loras.",
        )

    def _unknown(self, name: str) -> InvalidRequestError:
        self._check_enabled()
        return InvalidRequestError(
            "adapter", f"Adapter {show(name)} is not loaded; there are: {self._known()}.", 404
        )

    def _known(self) -> str:
        return ", ".join(map(show, self._by_name)) or "none"

    def _check_enabled(self) -> None:
        if not self.slots:
            raise InvalidRequestError(
                "adapter", "This engine takes no adapters: it was started without --enable-lora."
            )
