"""WaitingQueue: who is next, and what those who wait have in common with those who run.

Nothing here takes time that grows with how many wait, which may be a hundred thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from megatron_hybrid.engine.prefix_tree import PrefixTree
from megatron_hybrid.engine.tracked_request import Running, TrackedRequest

# A request overtakes others that wait this many steps longer for each unit of priority. So the
# order of two requests never changes while they wait, and nobody waits for ever.
STEPS_PER_PRIORITY = 256
INDEXED_AT_ONCE = 64  # requests a step
LOOKS_AHEAD = 4_194_304  # tokens of indexed prompts: all keys of a long queue would fill the memory
COMPARED_AT_ONCE = 64  # requests that leave a prompt in the same block and are looked at one by one
COMPARED_IN_A_STEP = 1024
CHUNK = 512  # requests


class WaitingQueue:
    """Requests in the order in which they are tried: by priority and age, then first come."""

    def __init__(self) -> None:
        self._order = _Order()
        self._arrivals = 0
        self._preempted: dict[TrackedRequest, None] = {}
        self._new: dict[TrackedRequest, None] = {}  # not indexed yet
        self._tree = PrefixTree()
        self._indexed: dict[TrackedRequest, int] = {}  # tokens
        self._indexed_tokens = 0
        self._comparisons = COMPARED_IN_A_STEP  # that are left

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._order)

    def add(self, request: TrackedRequest, step: int) -> None:
        """Queue a request that arrives at `step`."""
        self._arrivals += 1
        request.rank = (step + STEPS_PER_PRIORITY * request.priority, self._arrivals)
        self._order.add(request)
        self._new[request] = None

    def put_back(self, request: TrackedRequest) -> None:
        """Queue a request that was preempted at its old place."""
        self._order.add(request)
        self._new[request] = self._preempted[request] = None

    def remove(self, request: TrackedRequest) -> None:
        """Forget a request that waits."""
        self._order.remove(request)
        self._new.pop(request, None)
        self._preempted.pop(request, None)
        self._tree.remove(request)
        self._indexed_tokens -= self._indexed.pop(request, 0)

    def first(self, count: int) -> list[TrackedRequest]:
        """The next `count` requests, in order."""
        return list(islice(self._order, count))

    def preempted(self) -> list[TrackedRequest]:
        """Those who wait although they have begun, in order."""
        return sorted(self._preempted, key=_rank)

    # ------------------------------------------------------- looking ahead

    def to_index(self, first: Sequence[TrackedRequest]) -> list[TrackedRequest]:
        """Who is not indexed and is to be in this step, if there is time: who is tried next,
        `first`, then who came first. Called once a step."""
        self._comparisons = COMPARED_IN_A_STEP
        if not self._new:
            return []
        found = {request: None for request in first if request in self._new}
        room = LOOKS_AHEAD - self._indexed_tokens
        for request in islice(self._new, INDEXED_AT_ONCE):
            if room <= 0:
                break
            room -= request.num_tokens
            found[request] = None
        return list(found)

    def index(self, request: TrackedRequest) -> None:
        """Let `shared_with` find a request whose keys are all known."""
        assert request.keys is not None
        del self._new[request]
        self._tree.add(request, request.keys.blocks)
        self._indexed[request] = request.num_tokens
        self._indexed_tokens += request.num_tokens

    def forget_keys(self) -> None:
        """The keys of those who wait are no longer those of what is computed: index them again."""
        self._new |= dict.fromkeys(self._indexed)
        self._tree = PrefixTree()
        self._indexed, self._indexed_tokens = {}, 0

    def shared_with(self, running: Running, block_size: int, above: int) -> list[tuple[int, int]]:
        """Where those who wait leave a running request's prompt, at block `above` or behind:
        (tokens in common, how many requests). Not of all, where there are very many."""
        if not self._indexed:
            return []
        shared: Counter[int] = Counter()
        # the places behind others are worth more
        for count, leavers in reversed(list(self._tree.leavers(running.lease.keys.blocks, above))):
            if self._comparisons <= 0:
                break
            self._comparisons -= 1
            for waiting in islice(leavers, COMPARED_AT_ONCE):
                self._comparisons -= 1
                common = _common_tokens(running, waiting, count * block_size, block_size)
                # one token at least has to be left to compute
                position = min(common, waiting.num_tokens - 1, waiting.most_skipped)
                # who shares all of the prompt is served by the state at its end
                is_served = common == running.prefill_tokens and common <= waiting.most_skipped
                if not is_served and waiting.awaited_tokens <= position:
                    shared[position] += 1
        return list(shared.items())


class _Order:
    """Requests by rank, in chunks: so adding or removing one does not move all others."""

    def __init__(self) -> None:
        self._chunks: list[list[TrackedRequest]] = []  # none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TrackedRequest]:
        return chain.from_iterable(self._chunks)

    def add(self, request: TrackedRequest) -> None:
        self._length += 1
        place = min(self._place(request), len(self._chunks) - 1)
        if place < 0:
            self._chunks.append([request])
            return
        members = self._chunks[place]
        insort(members, request, key=_rank)
        if len(members) > 2 * CHUNK:
            self._chunks.insert(place + 1, members[CHUNK:])
            del members[CHUNK:]

    def remove(self, request: TrackedRequest) -> None:
        self._length -= 1
        place = self._place(request)
        members = self._chunks[place]
        del members[bisect_left(members, request.rank, key=_rank)]
        if not members:
            del self._chunks[place]

    def _place(self, request: TrackedRequest) -> int:
        """The chunk that the request is in, or would be."""
        return bisect_left(self._chunks, request.rank, key=lambda members: members[-1].rank)


def _rank(request: TrackedRequest) -> tuple[int, int]:
    return request.rank


def _common_tokens(running: Running, waiting: TrackedRequest, known: int, block_size: int) -> int:
    """Tokens that two prompts have in common, which share `known` and part in the next block."""
    end = min(known + block_size, running.prefill_tokens, waiting.num_tokens)
    differ = running.request.tokens(known, end) != waiting.tokens(known, end)
    return known + int(differ.argmax()) if differ.any() else end
