"""The kernel of Mamba2's decodes that convolves for itself, on a GPU: against a loop in float64,
and at the shapes of real models beside two kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, RecurrentState
from megatron_hybrid.kernels.kernel_set import KernelSet, select
from megatron_hybrid.kernels.protocols import (
    ConvConstants,
    Mamba2Constants,
    Mamba2Tokens,
)
from tests.kernels.convolved_cases import check_mamba2_runs
from tests.kernels.runs_cases import Play

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
STEPS = 24  # a race would show in some


@pytest.fixture(scope="module")
def gpu() -> KernelSet:
    return select("auto", torch.device("cuda"))


@DTYPES
@pytest.mark.parametrize(("head_dim", "size", "block_p"), [(64, 128, None), (16, 64, 8)])
def test_mamba2_equals_the_token_loop(
    gpu: KernelSet, dtype: torch.dtype, head_dim: int, size: int, block_p: int | None
) -> None:
    kernel = gpu.convolved_mamba2
    assert kernel is not None
    decode_runs = partial(kernel.decode_runs, block_p=block_p)
    play = Play(size, count=5, ring_length=4, most=1)
    check_mamba2_runs(decode_runs, play, head_dim, size, calls=20, dtype=dtype, device="cuda")


class Draw:
    """Random tensors on the device."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cuda").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator, device="cuda").to(dtype)

    def float(self, *shape: int) -> Tensor:
        return self(*shape, dtype=torch.float32)

    def conv(self, channels: int, bias: bool) -> ConvConstants:
        """Channels side by side, as in an engine."""
        return ConvConstants(self(4, channels).t() / 2, self(channels) if bias else None)

    def state(self, slots: int, channels: int, *shape: int) -> RecurrentState:
        return RecurrentState(self(slots, 3, channels).mT, self.float(slots, *shape))


def ints(values: list[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).cuda()


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Relative to the largest value."""
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize(("heads", "head_dim", "groups"), [(48, 64, 1), (64, 64, 8), (128, 64, 8)])
@pytest.mark.parametrize("sequences", [1, 32])
def test_mamba2_beside_two_kernels(
    gpu: KernelSet, sequences: int, heads: int, head_dim: int, groups: int
) -> None:
    """Step by step; windows and rings have the same bits, whoever is the last to read a window."""
    kernel, size, draw = gpu.convolved_mamba2, 128, Draw()
    assert kernel is not None
    sections = [heads * head_dim, groups * size, groups * size]
    channels = sum(sections)
    conv = draw.conv(channels, bias=True)
    constants = Mamba2Constants(
        -draw.float(heads).exp(), draw.float(heads), draw.float(heads) - 3, (0.0, float("inf"))
    )
    state = draw.state(sequences + 1, channels, heads, head_dim, size)
    own = RecurrentState(state.conv.mT.clone().mT, state.ssm.clone())
    rings = [
        draw(sequences, 4, *shape)
        for shape in ((channels,), (heads, head_dim), (groups, size), (heads,))
    ]
    own_rings = [ring.clone() for ring in rings]
    turn = torch.arange(sequences)
    slot = turn + 1
    for step in range(STEPS):
        unfolded = (turn + step) % 4
        if step == 0:
            unfolded = turn * 0
        since = torch.minimum(unfolded, torch.full_like(turn, step))
        runs = DecodeRuns(
            ints(torch.arange(sequences + 1)), ints(40 + step + turn), ints(since), ints(slot),
            ints(slot * (unfolded == 3)), ints(turn), ints(turn * 0), ints(turn * 0),
            most_unfolded=3,
        )  # fmt: skip
        row = draw(sequences, channels + heads + 64)
        x, dt = row[:, 32 : channels + 32], row[:, channels + 32 : channels + 32 + heads]
        y = kernel.decode_runs(
            x, dt, conv, constants, own, (own_rings[0], tuple(own_rings[1:])), runs
        )
        parts = gpu.conv.decode_runs(x, conv, state.conv, rings[0], runs).split(sections, dim=1)
        tokens = Mamba2Tokens(
            parts[0].unflatten(1, (heads, head_dim)),
            *(part.unflatten(1, (groups, size)) for part in parts[1:]),
            dt,
        )
        expected = gpu.mamba2_scan.decode_runs(tokens, constants, state.ssm, tuple(rings[1:]), runs)
        close(y, expected, 1e-2)
        close(own.ssm, state.ssm, 1e-5)
        assert torch.equal(own.conv, state.conv)
        for ours, theirs in zip(own_rings, rings, strict=True):
            assert torch.equal(ours, theirs)
    from megatron_hybrid.kernels.linear.products import counters

    assert not counters(torch.device("cuda:0")).any()
