"""Triton's kernel of Mamba2's decodes that convolves for itself, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

from megatron_hybrid.kernels.contract import DecodeRuns, RecurrentState
from megatron_hybrid.kernels.protocols import Mamba2Tokens
from tests.kernels.convolved_cases import Texts, check_mamba2_runs
from tests.kernels.runs_cases import Play
from tests.kernels.segments import int64

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.causal_conv1d import triton as conv  # noqa: E402
from megatron_hybrid.kernels.mamba2_scan import triton_convolved as mamba2  # noqa: E402
from megatron_hybrid.kernels.mamba2_scan import triton_decode  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("size", "block_p"), [(8, 16), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mamba2_equals_the_token_loop(dtype: torch.dtype, size: int, block_p: int) -> None:
    play = Play(size, count=3, ring_length=4, most=1)
    decode_runs = partial(mamba2.decode_runs, block_p=block_p)
    check_mamba2_runs(decode_runs, play, 16, size, calls=12, dtype=dtype, bias=size == 8)
    assert not mamba2.counters(torch.device("cpu")).any()


@pytest.mark.parametrize("unfolded", [0, 2, 3])
@pytest.mark.parametrize("seed", [None, 3], ids=["to the nearest", "by chance"])
def test_mamba2_has_the_bits_of_two_kernels(unfolded: int, seed: int | None) -> None:
    texts = Texts.random(2, 16, 8, dtype=torch.bfloat16)
    x, dt, conv_constants = texts.conv.x[:2], texts.dt, texts.conv.constants()
    constants = texts.constants._replace(rounding_seed=seed)
    shapes = [(x.shape[1],), (4, 16), (2, 8), (4,)]
    generator = torch.Generator().manual_seed(5)
    rings = [torch.randn(2, 4, *shape, generator=generator).bfloat16() for shape in shapes]
    state = RecurrentState(
        torch.randn(5, 3, x.shape[1], generator=generator).bfloat16().mT,
        torch.randn(5, 4, 16, 8, generator=generator).half(),
    )
    runs = DecodeRuns(
        int64([0, 1, 2]), int64([9, 12]), int64([unfolded, 1]), int64([1, 3]),
        int64([0 if unfolded < 3 else 1, 4]), int64([1, 0]), *[int64([0, 0])] * 2, most_unfolded=3,
    )  # fmt: skip
    own = [ring.clone() for ring in rings]
    other = RecurrentState(state.conv.mT.clone().mT, state.ssm.clone())
    y = mamba2.decode_runs(
        x, dt[:2], conv_constants, constants, state, (rings[0], tuple(rings[1:])), runs
    )
    parts = conv.decode_runs(x, conv_constants, other.conv, own[0], runs).split([64, 16, 16], dim=1)
    shaped = zip(parts, [(4, 16), (2, 8), (2, 8)], strict=True)
    tokens = Mamba2Tokens(*(part.unflatten(1, shape) for part, shape in shaped), dt[:2])
    expected = triton_decode.decode_runs(tokens, constants, other.ssm, tuple(own[1:]), runs)
    assert torch.equal(y, expected)
    assert torch.equal(state.conv, other.conv) and torch.equal(state.ssm, other.ssm)
    for ring, ours in zip(rings, own, strict=True):
        assert torch.equal(ring, ours)
