"""Which CUDA graph is captured when: a few at the start, the others while serving.

A capture keeps the host for as long as it takes to launch a step or two from Python. So with work
at hand only graphs are captured that steps have asked for and done without, one in many steps; the
others are captured when nobody wants anything. All ranks see the same steps, and so capture the
same graphs between the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_hybrid.execution.cuda_graphs import GraphSize, smallest_fit
from megatron_hybrid.execution.plan import StepDemand

# Graphs that a server has before it takes requests: of steps with prompts and without, the largest,
# which have room for all smaller ones, and the smallest, which one request alone wants.
AT_START = 4
STEPS_BETWEEN = 32  # captures, with work at hand


class CaptureSchedule:
    """The sizes that have no graph yet."""

    def __init__(self, sizes: Sequence[GraphSize] = ()) -> None:
        """`sizes`: all that are to have one."""
        self._sizes = tuple(sizes)
        self._left = dict.fromkeys(capture_order(sizes))  # in this order
        self._wanted: Counter[GraphSize] = Counter()  # steps that have done without
        self._steps = 0  # since the last capture

    def __len__(self) -> int:
        return len(self._left)

    def note(self, demand: StepDemand) -> None:
        """A step was computed, with the graphs that were there."""
        if not self._left:
            return
        self._steps += 1
        size = smallest_fit(self._sizes, demand)
        if size in self._left:
            self._wanted[size] += 1

    def due(self) -> GraphSize | None:
        """What to capture now although there is work; None: nothing."""
        return self.next() if self._wanted and self._steps >= STEPS_BETWEEN else None

    def next(self) -> GraphSize | None:
        """What to capture when there is no work: what most steps have done without, or the next
        one in their order. None: all are captured."""
        if not self._left:
            return None
        size = max(self._left, key=self._wanted.__getitem__)
        del self._left[size]
        del self._wanted[size]
        self._steps = 0
        return size

    def give_up(self) -> None:
        """Capture no more."""
        self._left.clear()
        self._wanted.clear()


def capture_order(sizes: Iterable[GraphSize]) -> list[GraphSize]:
    """The largest one first: it leaves the memory that smaller ones fit into. Then of each kind (of
    decodes, of decodes with drafts, with prompts; with and without adapters) in turn the one that
    fills its widest gap. Behind all of these come those of long prompts, in the same order: a short
    prompt is better off without a graph than with one of them."""
    sizes = list(sizes)
    kinds: dict[tuple[bool, bool, int], list[GraphSize]] = {}
    for size in sizes:
        if not size.is_long:
            kind = bool(size.prompts), bool(size.drafts), size.adapters
            kinds.setdefault(kind, []).append(size)
    ordered = [_halving(sorted(kind, key=_by_size)) for kind in kinds.values()]
    ordered.sort(key=lambda kind: _by_size(kind[0]), reverse=True)
    longest = max(map(len, ordered), default=0)
    short = [kind[place] for place in range(longest) for kind in ordered if place < len(kind)]
    return short + _halving(sorted((size for size in sizes if size.is_long), key=_by_size))


def _by_size(size: GraphSize) -> tuple[int, GraphSize]:
    return size.tokens, size


def _halving(ascending: Sequence[GraphSize]) -> list[GraphSize]:
    """The last, the first, the one in the middle, those in the middle of both halves, and so on."""
    ends = [*ascending[-1:], *ascending[:1]][: len(ascending)]
    gaps, found = [(0, len(ascending) - 1)], list(ends)
    for low, high in gaps:  # which grows
        if high - low > 1:
            middle = (low + high) // 2
            found.append(ascending[middle])
            gaps += [(middle, high), (low, middle)]
    return found
