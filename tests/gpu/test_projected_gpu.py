"""Mamba1's decodes from x_proj's result on, on a GPU: against a loop in float64, and at the shapes
of real models beside a kernel a piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.kernel_set import KernelSet, select
from megatron_hybrid.kernels.projected import LowRank, ProjectedMamba1
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from tests.kernels.projected_cases import check_decodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NORMED = pytest.mark.parametrize("normed", [True, False], ids=["normed", "as it is"])
# Channels, rank, state: Falcon-Mamba 7B and Jamba, Mamba 2.8b and 130m.
SHAPES = [(8192, 256, 16), (5120, 160, 16), (1536, 48, 16)]
STEPS = 24  # what is read too early would show in some
EPS = 1e-6


@pytest.fixture(scope="module")
def gpu() -> KernelSet:
    return select("auto", torch.device("cuda"))


@pytest.fixture(scope="module")
def kernel(gpu: KernelSet) -> ProjectedMamba1:
    assert gpu.projected_mamba1 is not None
    return gpu.projected_mamba1


@NORMED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (40, 5, 4), (64, 32, 128)], ids=str)
def test_equals_the_token_loop(
    kernel: ProjectedMamba1, shape: tuple[int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    check_decodes(kernel.decode, *shape, normed=normed, dtype=dtype, device="cuda")


def test_states_in_16_bits_follow(kernel: ProjectedMamba1) -> None:
    kinds = {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    check_decodes(kernel.decode, *SHAPES[0], normed=True, device="cuda", **kinds)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Relative to the largest value."""
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=tolerance * scale, rtol=tolerance)


@NORMED
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_beside_three_kernels(
    gpu: KernelSet,
    kernel: ProjectedMamba1,
    sequences: int,
    shape: tuple[int, int, int],
    normed: bool,
) -> None:
    """Step by step behind x_proj's own kernel, in a CUDA graph; and alone a sequence has the same
    bits."""
    channels, rank, size = shape
    sections = (rank, size, size)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x_proj = (normal(sum(sections), channels) * channels**-0.5).bfloat16()
    weight = (normal(channels, rank) * rank**-0.5).bfloat16()
    norms = normal(sum(sections)).bfloat16() if normed else None
    constants = Mamba1Constants(
        -normal(channels, size).exp(), normal(channels), normal(channels) - 3
    )
    state = normal(sequences + 1, channels, size)
    own = state.clone()
    slots = torch.arange(1, sequences + 1, dtype=torch.int32, device="cuda")
    plan = DecodeSlots(slots, slots.clone())
    inputs = normal(sequences, 2 * channels).bfloat16()

    def low_rank() -> LowRank:
        return LowRank(gpu.linear.multiply(inputs[:, :channels], x_proj), weight, norms, EPS)

    def ours(state: Tensor) -> Tensor:
        x, z = inputs.split(channels, dim=1)
        low = low_rank()
        assert kernel.takes(plan, low, state)
        return kernel.decode(x, z, low, constants, state, plan)

    def apart() -> Tensor:
        x, z = inputs.split(channels, dim=1)
        projected = gpu.linear.multiply(x, x_proj)
        if norms is not None:
            projected = gpu.norm.rms_norm_parts(projected, sections, norms, EPS)
        low, b, c = projected.split(sections, dim=1)
        dt = gpu.linear.multiply(low, weight)
        return gpu.mamba1_scan.decode(Mamba1Tokens(x, z, dt, b, c), constants, state, plan)

    ours(own.clone())  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours(own)
    for _ in range(STEPS):
        inputs.copy_(normal(sequences, 2 * channels))
        y.fill_(float("nan"))
        before = own.clone()
        graph.replay()
        close(y, apart(), 3e-2)
        close(own, state, 2e-2)
        assert torch.equal(own[0], before[0])
    if sequences == 1:
        return
    x, z = inputs.split(channels, dim=1)
    low, together, alone = low_rank(), own.clone(), own.clone()
    y = kernel.decode(x, z, low, constants, together, plan)
    last = slice(sequences - 1, sequences)
    low = low._replace(projected=low.projected[last])
    part = DecodeSlots(slots[last], slots[last])
    assert torch.equal(kernel.decode(x[last], z[last], low, constants, alone, part), y[last])
    assert torch.equal(alone[-1], together[-1])
