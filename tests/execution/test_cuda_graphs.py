"""Which sizes get a CUDA graph, and which of them a step is computed by."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.execution.cuda_graphs import (
    GraphSize,
    decode_sizes,
    graph_sizes,
    mixed_sizes,
    smallest_fit,
)
from megatron_hybrid.execution.plan import PrefillChunk, StepDemand, StepPlan
from megatron_hybrid.execution.prompt_room import PromptRoom
from tests.execution.steps import chunk


@pytest.mark.parametrize("most", [1, 2, 7, 24, 33, 100, 256, 1000])
@pytest.mark.parametrize("count", [-1, 1, 2, 6, 16])
def test_decodes_have_at_most_so_many_sizes_up_to_all_requests(count: int, most: int) -> None:
    sizes = decode_sizes(count, most)
    assert sizes[-1] == most and sorted(set(sizes)) == list(sizes)
    assert count < 0 or len(sizes) <= count


def test_no_sizes_are_no_sizes() -> None:
    assert decode_sizes(0, 256) == ()
    assert mixed_sizes(0, 256, 8192) == ()
    assert graph_sizes(0, 16, 256, 8192) == ()
    assert graph_sizes(1, 0, 256, 8192) == (GraphSize(256),)


@pytest.mark.parametrize("prompts", [1, 4, 16, 300])
@pytest.mark.parametrize("requests", [1, 8, 24, 256, 3000])
@pytest.mark.parametrize("tokens", [1, 48, 512, 8192])
def test_mixed_sizes_fit_into_the_engine(prompts: int, requests: int, tokens: int) -> None:
    sizes = mixed_sizes(prompts, requests, tokens)
    assert len(set(sizes)) == len(sizes) <= 36
    for size in sizes:
        assert size.decodes <= requests and size.tokens <= tokens
        assert 0 < size.prompts <= min(prompts, requests, size.prefill_tokens)
        assert size.checkpoints == 2 * size.prompts


@pytest.mark.parametrize("requests", [1, 24, 256])
@pytest.mark.parametrize("tokens", [600, 700, 2048, 8192])
def test_long_prompts_have_graphs_as_far_as_there_is_room(requests: int, tokens: int) -> None:
    short = graph_sizes(16, 16, requests, tokens)
    found = graph_sizes(16, 16, requests, tokens, 0, PromptRoom(2000, 10**7))
    assert found[: len(short)] == short and not any(size.is_long for size in short)
    long = found[len(short) :]
    assert all(size.is_long and size.prefill_tokens <= 2000 for size in long)
    assert all(size.tokens <= tokens and size.pairs == 10**7 for size in long)
    assert {size.decodes for size in long} <= {0, 32, requests}
    if tokens >= 2048:
        assert max(size.prefill_tokens for size in long) == 1536


def test_a_long_prompt_on_a_long_context_has_no_graph() -> None:
    sizes = graph_sizes(16, 16, 256, 8192, 0, PromptRoom(2000, 10**7))
    step = StepDemand.of(StepPlan(0, np.arange(0), prefills=[chunk(0, 0, 1000)]))
    later = StepDemand.of(StepPlan(0, np.arange(0), prefills=[chunk(0, 9100, 10_000)]))
    latest = StepDemand.of(StepPlan(0, np.arange(0), prefills=[chunk(0, 11_000, 12_000)]))
    short = StepDemand.of(StepPlan(0, np.arange(0), prefills=[chunk(0, 10**6 - 500, 10**6)]))
    found = [smallest_fit(sizes, demand) for demand in (step, later, latest, short)]
    assert [size and size.prefill_tokens for size in found] == [1024, 1024, None, 512]


def test_the_default_engine_has_mixed_graphs_of_few_and_many_decodes() -> None:
    sizes = graph_sizes(16, 16, 256, 8192)
    mixed = [size for size in sizes if size.prompts]
    assert len(sizes) - len(mixed) == 16 and len(mixed) <= 30
    assert {size.decodes for size in mixed} == {0, 8, 32, 128, 256}
    assert all(size.prompts == 16 for size in mixed)


def plan(decodes: int, *lengths: int, **changes: object) -> StepPlan:
    prefills: list[PrefillChunk] = [
        chunk(row, 0, length, **changes) for row, length in enumerate(lengths)
    ]
    return StepPlan(0, np.arange(decodes), prefills=prefills)


SIZES = [
    GraphSize(8, 64, 2, 4),
    GraphSize(0, 64, 2, 4),
    GraphSize(8, 16, 2, 4),
    GraphSize(8),
    GraphSize(1),
    GraphSize(0, 16, 2, 4),
]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan(0), GraphSize(1)),  # a dummy
        (plan(1), GraphSize(1)),
        (plan(2), GraphSize(8)),
        (plan(9), None),
        (plan(0, 16), GraphSize(0, 16, 2, 4)),
        (plan(0, 10, 7), GraphSize(0, 64, 2, 4)),
        (plan(1, 10, 6), GraphSize(8, 16, 2, 4)),
        (plan(8, 1), GraphSize(8, 16, 2, 4)),
        (plan(8, 17), GraphSize(8, 64, 2, 4)),
        (plan(8, 65), None),
        (plan(9, 1), None),
        (plan(0, 1, 1, 1), None),  # prompts
        (plan(0, 9, checkpoints=((1, 1),) * 4), GraphSize(0, 16, 2, 4)),
        (plan(0, 9, checkpoints=((1, 1),) * 5), None),
        (plan(0, 9, samples=False), GraphSize(0, 16, 2, 4)),
        (plan(0, 9, logprob_targets=np.zeros(9, dtype=np.int32)), None),
    ],
)
def test_the_smallest_graph_that_has_room_computes_a_step(
    step: StepPlan, expected: GraphSize | None
) -> None:
    demand = StepDemand.of(step)
    assert smallest_fit(SIZES, demand) == expected
    assert smallest_fit([], demand) is None


def test_a_graph_in_which_a_head_drafts_has_room_for_the_row_with_most() -> None:
    """Drafts from elsewhere may be spread over the rows in any way."""
    sizes = [GraphSize(8), GraphSize(8, drafts=8), GraphSize(8, drafts=32)]
    demand = StepDemand(decodes=3, drafts=5, runs=1)
    assert smallest_fit(sizes, demand) == sizes[1]
    assert smallest_fit(sizes, demand._replace(widest=1)) == sizes[1]
    assert smallest_fit(sizes, demand._replace(widest=3)) == sizes[2]
    assert smallest_fit(sizes, demand._replace(widest=5)) is None
