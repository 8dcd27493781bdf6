"""CUDA graphs of steps: captured for some sizes, each replayed for any step that it fits.

At batch 1 a step is a few hundred kernels of a few microseconds: launched one by one from Python
they take several times as long as they run.

Steps of decodes alone have graphs for many numbers of decodes; steps with prompts have "mixed"
graphs of so many decodes beside so many prompt tokens. What a step has less is padding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.execution.plan import StepDemand
from megatron_hybrid.execution.prompt_room import NO_LIMIT, NO_ROOM, PromptRoom

# Numbers of decodes; beyond these the next one is an eighth to a quarter larger.
_SMALL = (1, 2, 4, 8, 16, 24, 32)
# Tokens of decodes with drafts up to which narrower graphs gain nothing.
_FREE_TOKENS = 64
# Decodes and prompt tokens of mixed graphs. Up to 128 tokens a step mostly waits for the weights,
# so padding is nearly free.
_MIXED_DECODES = (0, 8, 32, 128, 256)
_PREFILL_TOKENS = (16, 64, 128, 256, 384, 512)
_MIXED_TOKENS = 544  # of both together, at most
# The same of long prompts, as far as there is a PromptRoom.
_LONG_DECODES = (0, 32)
_LONG_PREFILL_TOKENS = (640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)


class GraphSize(NamedTuple):
    """What a captured step has room for."""

    decodes: int
    prefill_tokens: int = 0
    prompts: int = 0
    checkpoints: int = 0  # stored in the middle of prompts
    drafts: int = 0  # behind the next tokens of the decodes
    pairs: int = NO_LIMIT  # of a prompt's token and one that it may see
    adapters: int = 0  # 1: tokens may have some

    @property
    def decode_tokens(self) -> int:
        """Of the decodes: their next tokens and the drafts."""
        return self.decodes + self.drafts

    @property
    def tokens(self) -> int:
        """All that a step of this size computes."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def is_long(self) -> bool:
        """Whether it is there for the length of its prompts."""
        return self.prefill_tokens >= _LONG_PREFILL_TOKENS[0]

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return self.decode_tokens + self.prompts


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # where a replay leaves them


class CudaGraphs:
    """All graphs share their memory, since one is replayed after the other. A graph can be captured
    while a step is computed: nothing that it consists of runs."""

    def __init__(self) -> None:
        self._graphs: dict[GraphSize, _Captured] = {}
        self._last_choice: tuple[StepDemand, GraphSize | None] | None = None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(self, size: GraphSize, compute: Callable[[], Tensor]) -> None:
        """`compute`: a step of this size of nothing but padding, whose inputs are where the graph
        will read them. Where the largest one comes first, the others fit into its memory. Raises
        what `compute` does, and for want of memory."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # Kernels can't be compiled while capturing, and what a kernel keeps for later ones must not
        # lie in the graphs' memory. Which kernels a size takes, nobody knows before.
        compute()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it waits for the device, and gives back all memory that is not in
        # use, which the steps in between would have to get again.
        with _no_garbage_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                logits = compute()
            finally:
                graph.capture_end()
            # Other graphs may write there, but none does before whoever reads them has.
            self._graphs[size] = _Captured(graph, _without_owner(logits))
            self._last_choice = None

    def clear(self) -> None:
        """Let go of all graphs, when the last replay is done."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()
        self._last_choice = None

    def choose(self, demand: StepDemand) -> GraphSize | None:
        """The size of the smallest graph that a step fits; None if there is none."""
        if self._last_choice is None or self._last_choice[0] != demand:
            self._last_choice = demand, smallest_fit(self._graphs, demand)
        return self._last_choice[1]

    def replay(self, size: GraphSize) -> Tensor:
        """Compute the step whose inputs are in place. The logits [rows, vocabulary] are gone with
        the next replay, of any graph."""
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.logits


class _Memory:
    """Says where a tensor lies, and does not keep it."""

    def __init__(self, values: Tensor) -> None:
        """values: in 16 or 32 bits."""
        self.__cuda_array_interface__ = {
            "shape": tuple(values.shape),
            "strides": tuple(stride * values.itemsize for stride in values.stride()),
            "typestr": f"<i{values.itemsize}",
            "data": (values.data_ptr(), False),
            "version": 2,
        }


def _without_owner(values: Tensor) -> Tensor:
    """The same tensor, whose memory may be used for others; [n, 0] as it is."""
    if not values.numel():
        return values
    words = torch.as_tensor(_Memory(values), device=values.device)
    return words.view(values.dtype)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An event, a graph or pinned memory that is destroyed during a capture invalidates it: another
    engine's, say, that nobody refers to any more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def smallest_fit(sizes: Iterable[GraphSize], demand: StepDemand) -> GraphSize | None:
    """The size of the fewest tokens that has room for a step, which is padded up to it; None if
    there is none, and for prompts that want log-probabilities: they have a row for every token."""
    if demand.eager:
        return None
    fitting = (
        size
        for size in sizes
        if demand.decodes <= size.decodes
        and demand.drafts <= size.drafts
        and demand.widest * size.decodes <= size.drafts
        and bool(demand.runs) == bool(size.drafts)
        and demand.prefill_tokens <= size.prefill_tokens
        and demand.prompts <= size.prompts
        and demand.checkpoints <= size.checkpoints
        and demand.pairs <= size.pairs
        and demand.adapters <= size.adapters
        and bool(demand.prompts) == bool(size.prompts)
    )
    return min(fitting, key=lambda size: (size.tokens, size), default=None)


def graph_sizes(
    count: int,
    mixed_prompts: int,
    max_requests: int,
    max_tokens: int,
    num_drafts: int = 0,
    long_prompts: PromptRoom = NO_ROOM,
    adapters: bool = False,
) -> tuple[GraphSize, ...]:
    """All sizes that get a graph: at most `count` of decodes alone (-1: as many as are of use) and,
    unless that is 0, mixed ones for up to `mixed_prompts` prompts (0: none). Where a decode may
    have `num_drafts` drafts, the decodes alone have graphs with and without them. `adapters`: all
    are there with and without adapters, whose kernels take their time even where no token has any.
    """
    if count == 0:
        return ()
    numbers = decode_sizes(count, max_requests)
    decodes = tuple(GraphSize(n) for n in numbers)
    if num_drafts:
        room = [GraphSize(n, drafts=n * w) for n in numbers for w in _draft_widths(n, num_drafts)]
        decodes += tuple(size for size in room if size.tokens <= max_tokens)
    sizes = decodes + mixed_sizes(mixed_prompts, max_requests, max_tokens, long_prompts)
    if adapters:
        sizes += tuple(size._replace(adapters=1) for size in sizes)
    return sizes


def _draft_widths(decodes: int, most: int) -> list[int]:
    """Drafts that each of so many decodes has room for, in several graphs: requests of which few
    drafts are accepted have one each, which must not cost what `most` of them do."""
    widths = [most]
    while widths[-1] > 1 and decodes * (1 + widths[-1]) > _FREE_TOKENS:
        widths.append(widths[-1] // 2)
    return widths


def decode_sizes(count: int, max_requests: int) -> tuple[int, ...]:
    """At most `count` numbers of decodes up to `max_requests`, which is always one of them; -1: as
    many as are of use; 0: none."""
    sizes = [size for size in _SMALL if size < max_requests]
    step = 16
    size = _SMALL[-1] + step
    while size < max_requests:
        sizes.append(size)
        step = max(step, 8 * (size // 64))
        size += step
    sizes.append(max_requests)
    if count < 0 or count >= len(sizes):
        return tuple(sizes)
    if count == 0:
        return ()
    # evenly over the list, which is dense where the steps are small
    kept = {sizes[-1 - (i * (len(sizes) - 1)) // max(count - 1, 1)] for i in range(count)}
    return tuple(sorted(kept))


def mixed_sizes(
    prompts: int, max_requests: int, max_tokens: int, long_prompts: PromptRoom = NO_ROOM
) -> tuple[GraphSize, ...]:
    """Sizes with up to `prompts` prompts, for an engine of so many requests and tokens a step."""
    if prompts == 0:
        return ()
    lengths = tuple(n for n in _LONG_PREFILL_TOKENS if n <= long_prompts.tokens)
    found = []
    for decodes, tokens, most, pairs in (
        (_MIXED_DECODES, _PREFILL_TOKENS, _MIXED_TOKENS, NO_LIMIT),
        (_LONG_DECODES, lengths, max_tokens, long_prompts.pairs),
    ):
        for n in (*(n for n in decodes if n < max_requests), max_requests):
            for length in tokens:
                if n + length <= min(most, max_tokens):
                    room = min(prompts, max_requests, length)
                    found.append(GraphSize(n, length, room, checkpoints=2 * room, pairs=pairs))
    return tuple(found)
