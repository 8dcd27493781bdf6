"""A store below a SymbolicCopier's pages: slow, forgetful, and failing where a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hybrid.errors import StoreError
from tests.engine.symbolic_copies import SymbolicCopier


@dataclass
class PageView:
    """In place of a page's memory."""

    copier: SymbolicCopier
    page: int
    nbytes: int = 1

    def read(self) -> Any:
        found = self.copier.pages[self.page]
        assert found is not None, "a page is read to which something is still being copied"
        return found

    def write(self, value: Any) -> None:
        self.copier.pages[self.page] = value


class SymbolicStore:
    """An ObjectStore of what pages hold. Engines may share it, as restarts do."""

    name, max_bytes = "symbolic", 0

    def __init__(self, *, loses: float = 0.0, fails: float = 0.0, seed: int = 0) -> None:
        """loses: the chance that a get finds nothing; fails: that a call raises."""
        self.objects: dict[bytes, list[Any]] = {}
        self.loses, self.fails = loses, fails
        self.calls: list[str] = []
        self._random = np.random.default_rng(seed)

    def _call(self, kind: str) -> None:
        self.calls.append(kind)
        if self._random.random() < self.fails:
            raise StoreError("The store failed.")

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._call("has")
        return [key in self.objects for key in keys]

    def get(self, key: bytes, parts: Sequence[Any]) -> bool:
        self._call("get")
        found = self.objects.get(key)
        for part in parts:
            part.write(None)  # also where nothing comes
        if found is None or len(found) != len(parts) or self._random.random() < self.loses:
            return False
        for part, value in zip(parts, found, strict=True):
            part.write(value)
        return True

    def read(self, key: bytes) -> bytes | None:
        self._call("read")
        return b"".join(self.objects[key]) if key in self.objects else None

    def put(self, key: bytes, parts: Sequence[Any]) -> bool:
        self._call("put")
        self.objects[key] = [p if isinstance(p, bytes) else p.read() for p in parts]
        return True

    def usage(self) -> tuple[int, int]:
        return len(self.objects), len(self.objects)

    def close(self) -> None:
        pass


class SlowExecutor(Executor):
    """Does what is asked of it when its future was polled for so many times."""

    def __init__(self, slowest: int, seed: int = 0) -> None:
        self.slowest = slowest
        self._random = np.random.default_rng(seed)

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        polls = int(self._random.integers(1, self.slowest + 1))
        return _SlowFuture(polls, lambda: function(*args, **options))


class _SlowFuture(Future[Any]):
    def __init__(self, polls: int, work: Callable[[], Any]) -> None:
        super().__init__()
        self._polls, self._work = polls, work

    def done(self) -> bool:
        self._polls -= 1
        if self._polls == 0:
            try:
                self.set_result(self._work())
            except StoreError as error:
                self.set_exception(error)
        return self._polls <= 0
