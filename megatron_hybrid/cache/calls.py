"""Calls: of something that others end while they are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_hybrid.errors import StoreError


class Calls:
    """None begins when it was closed. Any thread may call it."""

    def __init__(self, most: int = 0) -> None:
        """most: turns that calls may take at once."""
        self._changed = threading.Condition()
        self._free, self._under_way = most, 0
        self.closed = ""  # why; empty: it is not

    @contextmanager
    def call(self, turns: int = 0) -> Iterator[None]:
        """Waits for so many turns. Raises StoreError when it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._free >= turns)
            self.check()
            self._free -= turns
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._free += turns
                self._under_way -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raises StoreError when it is closed."""
        if self.closed:
            raise StoreError(self.closed)

    def close(self, reason: str) -> bool:
        """Wait until all calls have ended; False: it was closed before. reason: a sentence."""
        with self._changed:
            is_first = not self.closed
            self.closed = self.closed or reason
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._under_way)
            return is_first
