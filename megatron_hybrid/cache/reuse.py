"""ReuseEstimator: how soon a cached state will be read again, learnt from those before it.

States fall into groups by what is known of them when they are left: how often their conversation
has gone on so far, and after what pause; or, for the end of a first turn, how often others behind
the same shared beginning have gone on. For each group the estimator counts at which age states were
read and at which age they were given up. From that follows the hit density of a state of age a
(Beckmann, Chen and Cidon, "LHD", NSDI 2018): the hits that those of its group had after age a, by
the time that they went on to occupy a slot. Ages are in engine steps, in buckets that double.
"""

from __future__ import annotations

AGES = 24  # buckets: [1, 2), [2, 4), ... steps
RELEARNT_EVERY = 256  # events
FORGETTING = 0.9  # what earlier events still count, each time
PRIOR_EVENTS = 2.0  # as if so many states had been seen in each group
PAUSES = (40, 400, 4_000)  # steps: a tool's, a quick reader's, somebody's who does something else
SHARES = (0.1, 0.3, 0.6, 0.9)
TURNS = 4


class ReuseEstimator:
    """Hit densities by group and age."""

    def __init__(self) -> None:
        self._read: dict[int, list[float]] = {}
        self._gone: dict[int, list[float]] = {}
        self._density: dict[int, list[float]] = {}
        self._events = 0

    def density(self, group: int, age: int) -> float:
        """Expected hits a step of a state of this group that was last used `age` steps ago."""
        known = self._density.get(group)
        if known is None:
            return PRIOR[age.bit_length()]
        return known[age.bit_length()]

    def was_read(self, group: int, age: int) -> None:
        self._count(self._read, group, age)

    def was_evicted(self, group: int, age: int) -> None:
        self._count(self._gone, group, age)

    def _count(self, events: dict[int, list[float]], group: int, age: int) -> None:
        counts = events.get(group)
        if counts is None:
            self._read[group] = [0.0] * (AGES + 1)
            self._gone[group] = [0.0] * (AGES + 1)
            counts = events[group]
        counts[min(AGES, age.bit_length())] += 1.0
        self._events += 1
        if self._events % RELEARNT_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        for group, read in self._read.items():
            gone = self._gone[group]
            hits = alive = lifetime = 0.0
            density = [0.0] * (AGES + 1)
            for age in range(AGES, -1, -1):
                width = 2.0 ** max(0, age - 1)
                # whoever leaves in a bucket was there for half of it
                leaving = read[age] + gone[age]
                lifetime += (alive + 0.5 * leaving) * width
                alive += leaving
                hits += read[age]
                prior = PRIOR_EVENTS * width
                density[age] = (hits + prior * PRIOR[age]) / (lifetime + prior)
                read[age] *= FORGETTING
                gone[age] *= FORGETTING
            self._density[group] = density


# Before anything is known, the older a state is the longer it will take: density 1 / age.
PRIOR = [0.5 / 2.0 ** max(0, age - 1) for age in range(AGES + 40)]
