"""Python's own stops: the search for garbage among all objects. Each waiting request has some, and
with a hundred thousand of them a search takes a third of a second, in which nobody gets a token."""

from __future__ import annotations

import gc

# Collections of the middle generation before one of all objects: about an hour of decoding. Of what
# ends here nothing refers to itself; what does is young, and found among the young.
BEFORE_A_FULL_ONE = 10_000


def collect_seldom() -> None:
    """Once the engine is built: never look at what is there again, and seldom at all the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], BEFORE_A_FULL_ONE)
