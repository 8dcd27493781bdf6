"""WaitingQueue: who is next, and what those who wait have in common with those who run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.engine.tracked_request import TrackedRequest

# A request overtakes others that wait this many steps longer for each unit of priority. So the
# order of two requests never changes while they wait, and nobody waits for ever.
STEPS_PER_PRIORITY = 256
INDEXED_AT_ONCE = 256  # requests a step: hashing a long prompt takes a while
COMPARED_AT_ONCE = 64  # requests that leave a prompt in the same block and are looked at one by one


class WaitingQueue:
    """Requests in the order in which they are tried: by priority and age, then first come."""

    def __init__(self) -> None:
        self._order: list[TrackedRequest] = []
        self._arrivals = 0
        self._by_prefix: dict[BlockKey, dict[TrackedRequest, None]] = {}
        self._indexed: dict[TrackedRequest, list[BlockKey]] = {}
        self._new: dict[TrackedRequest, None] = {}  # not indexed yet

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._order)

    def add(self, request: TrackedRequest, step: int) -> None:
        """Queue a request that arrives at `step`."""
        self._arrivals += 1
        request.rank = (step + STEPS_PER_PRIORITY * request.priority, self._arrivals)
        self.put_back(request)

    def put_back(self, request: TrackedRequest) -> None:
        """Queue a request at its old place."""
        insort(self._order, request, key=_rank)
        self._new[request] = None

    def remove(self, request: TrackedRequest) -> None:
        del self._order[bisect_left(self._order, request.rank, key=_rank)]
        self._new.pop(request, None)
        for key in self._indexed.pop(request, ()):
            sharers = self._by_prefix[key]
            del sharers[request]
            if not sharers:
                del self._by_prefix[key]

    def first(self, count: int) -> list[TrackedRequest]:
        return self._order[:count]

    # ------------------------------------------------------- looking ahead

    def index(self, keys_of: Callable[[TrackedRequest], SequenceKeys]) -> None:
        """Let `shared_with` find those who came since the last call."""
        for request in list(islice(self._new, INDEXED_AT_ONCE)):
            del self._new[request]
            keys = self._indexed[request] = list(keys_of(request).blocks)
            for key in keys:
                self._by_prefix.setdefault(key, {})[request] = None

    def forget_keys(self) -> None:
        """The keys of those who wait are no longer those of what is computed: index them again."""
        self._by_prefix.clear()
        self._indexed.clear()
        self._new = dict.fromkeys(self._order)

    def shared_with(self, request: TrackedRequest, block_size: int) -> list[tuple[int, int]]:
        """Where those who wait leave a running request's prompt behind its `position`:
        (tokens in common, how many requests)."""
        keys = request.keys
        if keys is None or not self._by_prefix:
            return []
        shared: Counter[int] = Counter()
        first = max(1, request.position // block_size)
        sharers = self._by_prefix.get(keys.of_block(first)) if first <= len(keys.blocks) else None
        for count in range(first, len(keys.blocks) + 1):
            if not sharers:
                break
            behind = self._by_prefix.get(keys.blocks[count]) if count < len(keys.blocks) else None
            if behind is None or len(behind) < len(sharers):
                leavers = [w for w in sharers if behind is None or w not in behind]
                for waiting in leavers[:COMPARED_AT_ONCE]:
                    common = _common_tokens(request, waiting, count * block_size, block_size)
                    # who shares all of the prompt is served by the state at its end
                    if common < request.prefill_tokens:
                        # one token at least has to be left to compute
                        shared[min(common, waiting.num_tokens - 1)] += 1
            sharers = behind
        return list(shared.items())


def _rank(request: TrackedRequest) -> tuple[int, int]:
    return request.rank


def _common_tokens(
    running: TrackedRequest, waiting: TrackedRequest, known: int, block_size: int
) -> int:
    """Tokens that two prompts have in common, which share `known` and part in the next block."""
    end = min(known + block_size, running.prefill_tokens, waiting.num_tokens)
    differ = running.tokens(known, end) != waiting.tokens(known, end)
    return known + int(differ.argmax()) if differ.any() else end
