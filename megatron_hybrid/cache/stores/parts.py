"""The parts of an object: contiguous pieces of memory, one after the other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def views_of(parts: Sequence[memoryview | bytes | bytearray]) -> list[memoryview]:
    """The parts as bytes, without empty ones, which system calls do not tell from an end."""
    views = [part if isinstance(part, memoryview) else memoryview(part) for part in parts]
    return [view.cast("B") for view in views if view.nbytes]


def length_of(views: Sequence[memoryview]) -> int:
    """Bytes."""
    return sum(view.nbytes for view in views)


def checksum_of(views: Sequence[memoryview]) -> int:
    """CRC-32: some 3 GB/s a core where BLAKE2b makes 0.5 and SHA-256 1, and without the GIL.

    It has to find accidents only: beside the key and the size, which tell objects that were swapped
    or cut off, that is bits that flipped and pages that never got to where they belong."""
    checksum = 0
    for view in views:
        checksum = zlib.crc32(view, checksum)
    return checksum
