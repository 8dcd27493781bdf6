"""Recurrences of batch-invariant mode: through prompts, decodes and drafts in random pieces, bit
for bit as one prompt (tests/kernels/replay_cases.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from megatron_hybrid.kernels.protocols import (  # noqa: E402
    ConvConstants,
    DeltaRuleConstants,
    DeltaRuleTokens,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
)
from megatron_hybrid.kernels.replay_triton.replays import TRITON_REPLAYS  # noqa: E402
from tests.kernels.replay_cases import Kind, Session, wider  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SEEDS = pytest.mark.parametrize("seed", range(3))
LENGTHS = [5, 16, 33, 70, 200]


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def scan_kind(
    replay: Any, tokens: Any, shapes: list[tuple[int, ...]], constants: Any,
    state: tuple[int, ...], kept: list[int], chunk: int, dtype: torch.dtype,
) -> Kind:  # fmt: skip
    """kept: places of `shapes` that a ring keeps."""

    def draw(count: int, generator: torch.Generator) -> Any:
        return tokens(
            *(
                torch.randn(count, *shape, generator=generator, device="cuda").to(dtype)
                for shape in shapes
            )
        )

    def run(values: Any, states: Tensor, ring: Any, plan: Any) -> Tensor:
        y: Tensor = replay.run(values, constants, states, ring, plan)
        return y

    return Kind(
        draw, run, lambda part, length: replay.plan(part, chunk, length), state,
        tuple(shapes[i] for i in kept), chunk, "cuda", dtype,
    )  # fmt: skip


@SEEDS
@DTYPES
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "size"), [(8, 64, 1, 128), (4, 64, 2, 256), (4, 16, 2, 16)]
)
def test_mamba2(
    heads: int, head_dim: int, groups: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    constants = Mamba2Constants(
        -rand(heads) * 3, randn(heads), randn(heads) - 1, (0.0, float("inf"))
    )
    shapes: list[tuple[int, ...]] = [(heads, head_dim), (groups, size), (groups, size), (heads,)]
    replay, chunk = TRITON_REPLAYS.mamba2_scan, TRITON_REPLAYS.chunk
    state = (heads, head_dim, size)
    kind = scan_kind(replay, Mamba2Tokens, shapes, constants, state, [0, 1, 3], chunk, dtype)
    Session(kind, LENGTHS, seed).check()


@SEEDS
@DTYPES
@pytest.mark.parametrize(
    ("heads", "k_heads", "k_dim", "v_dim"),
    [(4, 2, 128, 128), (3, 1, 64, 64), (4, 4, 16, 16), (3, 3, 96, 192)],
)
def test_gated_delta_rule(
    heads: int, k_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    scale = 1.0 if k_dim == v_dim else 2.0
    constants = DeltaRuleConstants(-rand(heads), randn(heads), beta_scale=scale)
    k, v = (k_heads, k_dim), (heads, v_dim)
    shapes: list[tuple[int, ...]] = [k, k, v, (heads,), (heads,)]
    replay, chunk = TRITON_REPLAYS.gated_delta_rule, TRITON_REPLAYS.chunk
    state = (heads, v_dim, k_dim)
    kind = scan_kind(replay, DeltaRuleTokens, shapes, constants, state, [1, 2, 3, 4], chunk, dtype)
    Session(kind, LENGTHS, seed).check()


@SEEDS
@DTYPES
@pytest.mark.parametrize(("heads", "dim", "bound"), [(4, 128, None), (3, 64, -5.0), (2, 96, None)])
def test_kimi_delta_attention(
    heads: int, dim: int, bound: float | None, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    constants = DeltaRuleConstants(-rand(heads) * 4, randn(heads, dim), lower_bound=bound)
    head = (heads, dim)
    shapes: list[tuple[int, ...]] = [head, head, head, head, (heads,)]
    replay, chunk = TRITON_REPLAYS.gated_delta_rule, TRITON_REPLAYS.chunk
    state = (heads, dim, dim)
    kind = scan_kind(replay, DeltaRuleTokens, shapes, constants, state, [1, 2, 3, 4], chunk, dtype)
    Session(kind, LENGTHS, seed).check()


@SEEDS
@DTYPES
@pytest.mark.parametrize(("channels", "size"), [(512, 16), (64, 8)])
def test_mamba1(channels: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    constants = Mamba1Constants(-rand(channels, size) - 0.1, randn(channels), randn(channels))
    of_channels, of_state = (channels,), (size,)
    shapes: list[tuple[int, ...]] = [of_channels, of_channels, of_channels, of_state, of_state]
    replay, chunk = TRITON_REPLAYS.mamba1_scan, TRITON_REPLAYS.mamba1_chunk
    state = (channels, size)
    kind = scan_kind(replay, Mamba1Tokens, shapes, constants, state, [0, 2, 3], chunk, dtype)
    Session(kind, LENGTHS, seed).check()


@SEEDS
@DTYPES
@pytest.mark.parametrize(("chunk", "width"), [(1, 4), (4, 4), (16, 4), (16, 10)])
def test_convolutions(chunk: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    channels = 1040
    conv = TRITON_REPLAYS.conv
    constants = ConvConstants(randn(channels, width).to(dtype), randn(channels).to(dtype), True)

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, channels, generator=generator, device="cuda").to(dtype)

    def run(x: Tensor, state: Tensor, ring: Any, plan: Any) -> Tensor:
        some = wider(ring[0])
        y = conv.run(x, constants, state, some, plan)
        ring[0].copy_(some)
        return y

    kind = Kind(
        draw,
        run,
        lambda part, length: conv.plan(part, chunk, width, length),
        (channels, width - 1), ((channels,),), chunk, "cuda", dtype,
    )  # fmt: skip
    Session(kind, LENGTHS, seed).check()
