"""ObjectStore: bytes by key, outside of this process: in files, or in another machine's memory.

What is stored never changes: a key says all that its bytes depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ObjectStore(Protocol):
    """Any thread may call it. A call may take long; one that fails raises StoreError, whose message
    says what to do. Keys are digests of up to 32 bytes, which tell nothing of what is stored."""

    name: str  # in figures and logs
    max_bytes: int  # that it takes; 0: it does not say

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is there, as far as can be told without reading it."""

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill `parts`, one after the other, with all that is stored under a key. False: it is not
        there, or it is not what was put there, whole; `parts` may be written to all the same."""

    def read(self, key: bytes) -> bytes | None:
        """All that is stored under a key: of small ones, whose size is not known. None as above."""

    def put(self, key: bytes, parts: Sequence[memoryview | bytes]) -> bool:
        """Store `parts`, one after the other, in the place of what may have been there: whole, or
        not at all. False: there is no room."""

    def usage(self) -> tuple[int, int]:
        """Bytes that are taken and objects, about. Quick."""

    def close(self) -> None:
        """It is not called any more. What is stored stays."""
