"""Rendezvous hashing with bounded loads: a place from a prompt's beginning and what runs where.

Needs no KV events and no memory of what was placed: whoever knows how much runs on each replica
chooses alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

# A replica takes no more than so many times the mean load. 1.25 is usual for many requests and
# servers; docs/routing.md measures it and others.
BOUND = 1.5


def key_of(blocks: Sequence[int], first: int = 1) -> bytes:
    """What prompts that share their first blocks have in common. blocks: hashes of their full
    blocks, each of which stands for all before it. Empty without a full block."""
    return blocks[min(first, len(blocks)) - 1].to_bytes(8, "little") if blocks else b""


def bounded_place(key: bytes, loads: Mapping[int, int], bound: float = BOUND) -> int:
    """The first replica in the key's own order whose load, before this request, is less than
    `bound` times the mean of all with it. `loads`: by replica; `bound` is more than 1, so that
    there always is one."""
    limit = bound * (sum(loads.values()) + 1) / len(loads)
    return next(one for one in ranked(key, loads) if loads[one] < limit)


def ranked(key: bytes, replicas: Mapping[int, int] | Sequence[int]) -> list[int]:
    """Replicas in an order of the key's own. One that goes or comes changes nothing between the
    others."""
    return sorted(
        replicas, key=lambda one: hashlib.blake2b(key + one.to_bytes(4, "little")).digest()
    )
