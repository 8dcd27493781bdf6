"""Python's own stops: the search for garbage among all objects. Each waiting request has some, and
with a hundred thousand of them a search takes a third of a second, in which nobody gets a token."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Collections of the middle generation before one of all objects: about an hour of decoding. Of what
# ends here nothing refers to itself; what does is young, and found among the young.
BEFORE_A_FULL_ONE = 10_000


def collect_seldom() -> None:
    """Once the engine is built: never look at what is there again, and seldom at all the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], BEFORE_A_FULL_ONE)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Hardly ever look at all objects meanwhile, in a process that is not the engine's alone: what
    torch and others have imported takes 0.1 s or more, and nobody gets a token."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], BEFORE_A_FULL_ONE))
    try:
        yield
    finally:
        gc.set_threshold(*before)
