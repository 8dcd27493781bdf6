"""ReplayCost: what losing a state would cost, from how soon states like it were read again.

States fall into groups by what is known of them: where several prompts part, how often it was read;
at the end of an answer, how often the conversation has gone on so far and after what pause, or, for
a first answer, how many of the others behind the same shared beginning have gone on. For each group
the rule counts at which age states were read and at which age they were lost. From that
follows the hit density of a state (Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by
Maximizing Hit Density", NSDI 2018): the reads that those of its group had at its age or later, by
the time that they went on to occupy their slots.

Ages are in engine steps, in buckets that double.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed, Score, ScoringRule

OLDEST = 24  # the last bucket; the first ones are [0, 1), [1, 2), [2, 4), [4, 8) steps
LEARNS_EVERY = 256  # reads and losses
FORGETTING = 0.9  # what older ones still count, each time
PRIOR_STATES = 2.0  # what is assumed of a group before anything is seen counts as so many

# Where groups of ends are divided. A step takes 10 to 30 ms: tools answer within a second, quick
# readers within ten, others within minutes.
PAUSES = (40, 400, 4_000)  # steps
SHARES = (0.1, 0.3, 0.6, 0.9)  # of first answers that went on
MOST_TURNS = 4
MOST_READS = 3

Group = tuple[str, int, int]


def _width(age: int) -> float:
    """Steps in a bucket."""
    return 2.0 ** max(0, age - 1)


# Until more is known, a state of age a is read with density 1 / 2a: the older, the later.
_PRIOR = [0.5 / _width(age) for age in range(64)]


class ReplayCost(ScoringRule):
    """The state goes first that is expected to save the fewest tokens for the time that it stays.

    That is the tokens to replay from the nearest surviving ancestor, times the hit density of
    states like it at its age. A state with one other behind it on the same path, or one request
    running from it, covers nothing that the other one won't, unless somebody branches off between
    them: it goes before the rest. Where several prompts part, or two have read it, they do.
    """

    def __init__(self) -> None:
        zeros = [0.0] * (OLDEST + 1)
        self._read: defaultdict[Group, list[float]] = defaultdict(zeros.copy)
        self._lost: defaultdict[Group, list[float]] = defaultdict(zeros.copy)
        self._density: dict[Group, list[float]] = {}
        self._events = 0
        self._no_fork = CachedState(b"", 0, "")  # of sequences that share no beginning

    def score(self, state: CachedState, now: int) -> Score:
        """The reads to expect in a step that it stays, times the tokens that each spares."""
        covered = state.children + state.runners == 1 and not state.is_shared
        worth = max(1, state.replay_tokens) * self.density(state, now)
        return 0 if covered else 1, worth

    def density(self, state: CachedState, now: int) -> float:
        """Reads to expect of a cached state, a step that it stays."""
        age = (now - state.used_at).bit_length()
        known = self._density.get(state.group)
        return _PRIOR[age] if known is None else known[min(age, OLDEST)]

    def was_left(self, state: CachedState) -> None:
        """A state is cached from now on."""
        if self._is_first_answer(state):
            (state.fork or self._no_fork).born += 1
        state.group = self._group_of(state)

    def was_read(self, state: CachedState, now: int) -> None:
        """A state was read; it is as it was before."""
        if self._is_first_answer(state) and not state.hits:
            (state.fork or self._no_fork).continued += 1
        self._count(self._read[state.group], now - state.used_at)
        state.hits += 1
        state.group = self._group_of(state)

    def was_lost(self, state: CachedState, now: int) -> None:
        """A state had to go."""
        self._count(self._lost[state.group], now - state.used_at)

    def _count(self, counts: list[float], age: int) -> None:
        counts[min(age.bit_length(), OLDEST)] += 1.0
        self._events += 1
        if self._events % LEARNS_EVERY == 0:
            for group in self._read.keys() | self._lost.keys():
                self._learn(group)

    def _learn(self, group: Group) -> None:
        read, lost = self._read[group], self._lost[group]
        density = self._density.setdefault(group, list(_PRIOR[: OLDEST + 1]))
        reads = states = steps = 0.0  # at this age or later
        for age in range(OLDEST, -1, -1):
            leaving, width = read[age] + lost[age], _width(age)
            steps += (states + 0.5 * leaving) * width  # those who leave stay half of the bucket
            states += leaving
            reads += read[age]
            assumed = PRIOR_STATES * width
            density[age] = (reads + assumed * _PRIOR[age]) / (steps + assumed)
            read[age] *= FORGETTING
            lost[age] *= FORGETTING

    def _group_of(self, state: CachedState) -> Group:
        if state.kind in placement.SHARED_KINDS:
            return "shared", min(state.hits.bit_length(), 2 * MOST_READS), 0
        if state.hits:
            return "read", min(state.hits, MOST_READS), 0
        if state.kind != placement.ANSWER_END:
            return state.kind, 0, 0
        if state.turn:
            return "turn", min(state.turn, MOST_TURNS), bisect(PAUSES, state.pause)
        fork = state.fork or self._no_fork
        return "first", bisect(SHARES, (fork.continued + 0.5) / (fork.born + 1.0)), 0

    @staticmethod
    def _is_first_answer(state: CachedState) -> bool:
        return state.kind == placement.ANSWER_END and state.turn == 0


def queue_of(policy: str) -> EvictionQueue:
    """The order in which states go under one of eviction.POLICIES."""
    return EvictionQueue(ReplayCost() if policy == "replay_cost" else LeastRecentlyUsed())
