"""Decodes with drafts on a GPU, at the shapes of real models, against the CPU's plain kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.recurrent_kinds import RecurrentKind, recurrent_kinds
from megatron_hybrid.kernels.kernel_set import REFERENCE, KernelSet, select
from megatron_hybrid.kernels.protocols import ConvConstants
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from tests.kernels.conv_cases import on
from tests.kernels.runs_cases import Play

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
CALLS = 6


def kind_on(model: str, kernels: KernelSet, device: str, dtype: torch.dtype) -> RecurrentKind:
    config = ModelFolder.open(CONFIGS / model).config
    return next(recurrent_kinds(config, kernels, torch.device(device), dtype))


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest value."""
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=tolerance * scale, rtol=tolerance
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("most", [6, 1], ids=["drafts", "single tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        "nemotron-h-8b",
        "granite-4.0-h-tiny",
        "falcon-h1-7b",
        "falcon-mamba-7b",
        "qwen3-next-80b-a3b",
    ],
)
def test_recurrences(model: str, dtype: torch.dtype, most: int) -> None:
    gpu = select("auto", torch.device("cuda"))
    ours, plain = kind_on(model, gpu, "cuda", dtype), kind_on(model, REFERENCE, "cpu", dtype)
    play = Play(seed=3, ring_length=2 * most + 2, most=most)
    expected = normal(play.slots, *plain.state)
    state = expected.cuda()
    rings = [
        torch.zeros(play.count, play.ring_length, *values.shape[1:]).to(dtype)
        for values in plain.inputs(1).kept
    ]
    own = tuple(ring.cuda() for ring in rings)
    for number in range(CALLS):
        call = play.call(padding=number % 3)
        inputs = plain.inputs(sum(call.lengths) + call.padding)
        runs = call.runs()
        y = plain.kernel.decode_runs(
            inputs, plain.constants, expected, tuple(rings),
            REFERENCE.plan_runs(runs, play.ring_length),
        )  # fmt: skip
        found = ours.kernel.decode_runs(
            inputs._make(values.cuda() for values in inputs), ours.constants, state, own,
            gpu.plan_runs(on(runs, "cuda"), play.ring_length),
        )  # fmt: skip
        close(found, y, dtype)
        close(state, expected, torch.float32)
        for ring, kept in zip(own, rings, strict=True):
            assert torch.equal(ring.cpu(), kept)
        call.done()


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_the_delta_rules_single_tokens_are_those_of_its_runs(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """In between are calls with drafts."""
    gpu = select("auto", torch.device("cuda"))
    kind = kind_on("qwen3.5-35b-a3b", gpu, "cuda", dtype)
    play = Play(seed=5, count=6, ring_length=6)
    first = normal(play.slots, *kind.state).to(state_dtype).cuda()
    rings = [
        torch.zeros(play.count, play.ring_length, *values.shape[1:], dtype=dtype, device="cuda")
        for values in kind.inputs(1).kept
    ]
    ours, theirs = ((first.clone(), tuple(ring.clone() for ring in rings)) for _ in range(2))
    for number in range(4 * CALLS):
        play.most = 3 if number % 4 == 3 else 1
        call = play.call(padding=number % 3)
        inputs = kind.inputs(sum(call.lengths) + call.padding)
        runs = gpu.plan_runs(on(call.runs(), "cuda"), play.ring_length)
        expected = kind.kernel.decode_runs(
            inputs, kind.constants, *theirs, replace(runs, most_unfolded=None)
        )
        if runs.most_unfolded is not None:
            runs = replace(runs, most_unfolded=play.ring_length - 1)
        found = kind.kernel.decode_runs(inputs, kind.constants, *ours, runs)
        close(found, expected.cpu(), dtype)
        # roundings of states add up
        close(ours[0], theirs[0].cpu(), torch.float32 if first.dtype == torch.float32 else dtype)
        for own, other in zip(ours[1], theirs[1], strict=True):
            assert torch.equal(own, other)
        call.done()


@pytest.mark.parametrize("most", [6, 1], ids=["drafts", "single tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", ["nemotron-h-8b", "lfm2-1.2b"])
def test_convolutions(model: str, dtype: torch.dtype, most: int) -> None:
    gpu = select("auto", torch.device("cuda"))
    kind = kind_on(model, gpu, "cuda", dtype)
    play = Play(seed=4, ring_length=2 * most + 2, most=most)
    # channels side by side, as in an engine
    expected = normal(play.slots, kind.width - 1, kind.channels).to(dtype).mT
    state = expected.mT.contiguous().cuda().mT
    weight = normal(kind.channels, kind.width).to(dtype)
    side_by_side = weight.t().contiguous().t().cuda()
    constants = ConvConstants(weight, None, kind.silu)
    ring = torch.zeros(play.count, play.ring_length, kind.channels).to(dtype)
    own = torch.nn.functional.pad(ring.cuda(), (4, 4))[..., 4:-4]  # some channels of a wider one
    for number in range(CALLS):
        call = play.call(padding=number % 3)
        x = torch.randn(sum(call.lengths) + call.padding, kind.channels).to(dtype)
        sizes = kind.width, play.ring_length
        plan = REFERENCE.conv.plan_runs(call.runs(), *sizes)
        y = REFERENCE.conv.decode_runs(x, constants, expected, ring, plan)
        plan = gpu.conv.plan_runs(on(call.runs(), "cuda"), *sizes)
        found = gpu.conv.decode_runs(
            x.cuda(), constants._replace(weight=side_by_side), state, own, plan
        )
        close(found, y, dtype)
        assert torch.equal(state.cpu(), expected) and torch.equal(own.cpu(), ring)
        call.done()
