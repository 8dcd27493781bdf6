"""Steps of CUDA graphs, without CUDA: what a graph does is imitated by calling, for every step of a
size, the same function on the same tensors, on kernels that read everything from tensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("the GPU tests replay real graphs", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from megatron_hybrid.execution.cuda_graphs import GraphSize, smallest_fit  # noqa: E402
from megatron_hybrid.execution.plan import (
    StepDemand,  # noqa: E402
)
from megatron_hybrid.execution.runner import ModelRunner  # noqa: E402
from megatron_hybrid.kernels import kernel_set  # noqa: E402
from megatron_hybrid.parallel import ParallelContext  # noqa: E402
from tests.execution.steps import Steps, chunk  # noqa: E402
from tests.models.conftest import TinyModel, random_tokens  # noqa: E402

SIZES = [
    GraphSize(2),
    GraphSize(5),
    GraphSize(0, 16, 2, 4),
    GraphSize(4, 16, 2, 4),
    GraphSize(0, 48, 3, 6),
    GraphSize(6, 48, 3, 6),
]


class Imitation:
    """Of CudaGraphs."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps: dict[GraphSize, Callable[[], Tensor]] = {
            size: runner._prepare_dummy(size) for size in SIZES
        }
        self.replays: list[GraphSize] = []

    def choose(self, demand: StepDemand) -> GraphSize | None:
        return smallest_fit(self.steps, demand)

    def replay(self, size: GraphSize) -> Tensor:
        self.replays.append(size)
        return self.steps[size]()


class Both:
    """Every step on the reference without graphs, and on padded steps of the Triton kernels."""

    def __init__(self, tiny: TinyModel, parallel: ParallelContext) -> None:
        model = copy.copy(tiny.ours)
        model.kernels = kernel_set._gpu()
        self.plain, self.padded = Steps(tiny.ours, parallel), Steps(model, parallel)
        with torch.inference_mode():
            self.graphs = Imitation(self.padded.runner)
        self.padded.runner._graphs = self.graphs  # type: ignore[assignment]

    def row(self, *args: object, **options: object) -> None:
        self.plain.row(*args, **options)  # type: ignore[arg-type]
        self.padded.row(*args, **options)  # type: ignore[arg-type]

    def step(self, expected: GraphSize | None, **plan: object) -> None:
        self.graphs.replays.clear()
        truth = self.plain.step(**plan)  # type: ignore[arg-type]
        found = self.padded.step(**plan)  # type: ignore[arg-type]
        assert self.graphs.replays == ([] if expected is None else [expected])
        assert found.tokens.tolist() == truth.tokens.tolist()
        assert set(found.logprobs) == set(truth.logprobs)
        for row, (entry,) in found.logprobs.items():
            assert entry.logprob == pytest.approx(truth.logprobs[row][0].logprob, abs=1e-4)
        for ours, theirs in zip(self.tensors(self.padded), self.tensors(self.plain), strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], atol=2e-4, rtol=2e-4, equal_nan=True)

    @staticmethod
    def tensors(steps: Steps) -> Iterator[Tensor]:
        """Every cache; block 0 and slot 0 may hold anything."""
        for kv in steps.caches.kv.values():
            yield from (kv.key, kv.value)
        for state in steps.caches.state.values():
            yield from (state.conv, state.ssm)
        yield steps.caches.end_logits


@pytest.mark.parametrize("family", ["bamba", "nemotron_h_moe", "llama"])
def test_padded_steps_compute_what_unpadded_ones_do(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext, family: str
) -> None:
    """One after the other in the same tensors, whose contents are those of the step before."""
    both = Both(tiny(family), parallel)
    prompt, other = random_tokens(37), random_tokens(23, seed=1)
    both.row(0, [3, 9, 4, 0], slot=20)
    end = chunk(0, 0, 37, prompt=prompt, write_slot=20, logits_slot=20, checkpoints=((16, 19),))
    both.step(SIZES[4], prefills=[end])
    for row in range(1, 6):
        both.row(row, [8 + 4 * row, 9 + 4 * row])
    both.row(3, [3, 21])  # the first block is shared with row 0
    both.step(SIZES[0], decodes=[0])
    short = [chunk(1, 0, 9, prompt=other, samples=False), chunk(2, 0, 7, prompt=other)]
    both.step(SIZES[3], decodes=[0], prefills=short)
    # one goes on from its state, one ends and is kept, one is resumed, and a block is copied
    following = chunk(1, 9, 23, prompt=other, read_slot=2, checkpoints=((16, 18),))
    kept = chunk(3, 0, 19, prompt=prompt, logits_slot=17, write_from=16)
    both.step(
        SIZES[5],
        decodes=[0, 2],
        prefills=[following, kept],
        resumed=[(4, 20)],
        copies=[(4, 25, 5)],
    )
    both.row(4, [3, 9, 25], slot=20, position=37)
    both.step(SIZES[1], decodes=[0, 1, 2, 3, 4], resumed=[(5, 17)], copies=[(5, 30, 3)])
    assert both.padded.runner.replayed == {"decode": 2, "mixed": 3}


def test_what_no_graph_has_room_for_runs_without_one(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext
) -> None:
    both = Both(tiny("bamba"), parallel)
    text = random_tokens(60)
    for row in range(8):
        both.row(row, [4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3])
    both.row(0, [31, 1, 2, 3])
    many = [chunk(row, 0, 3, prompt=text) for row in range(4)]
    both.step(None, prefills=many)
    targets = np.asarray(text[1:5], dtype=np.int32)
    both.step(None, prefills=[chunk(4, 0, 5, prompt=text, logprob_targets=targets)])
    both.step(None, decodes=[0, 1], prefills=[chunk(5, 0, 49, prompt=text)])
    both.step(SIZES[5], decodes=[0, 1, 2, 3, 4, 5], prefills=[chunk(6, 0, 3, prompt=text)])
    both.step(None, decodes=[0, 1, 2, 3, 4, 5])


def test_idle_steps_change_nothing(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext
) -> None:
    both = Both(tiny("bamba"), parallel)
    both.row(0, [3, 9, 4, 0])
    both.step(SIZES[2], prefills=[chunk(0, 0, 11, prompt=random_tokens(11))])
    both.padded.runner.dummy_forward()
    assert both.graphs.replays[-1] == SIZES[0]
    both.step(SIZES[0], decodes=[0])
