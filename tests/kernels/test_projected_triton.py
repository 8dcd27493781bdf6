"""Triton's kernel of Mamba1's decodes from x_proj's result on, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.protocols import Mamba1Tokens
from tests.kernels.projected_cases import Layer, check_decodes
from tests.kernels.segments import int64, poisoned

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.linear import one_row  # noqa: E402
from megatron_hybrid.kernels.mamba1_scan import triton_decode, triton_projected  # noqa: E402
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402
from tests.thorough import A_THIRD

pytestmark = pytest.mark.usefixtures("poisoned")
NORMED = pytest.mark.parametrize("normed", [True, False], ids=["normed", "as it is"])


@A_THIRD
@NORMED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("channels", "rank", "size"), [(16, 256, 16), (24, 40, 4), (8, 5, 64)])
def test_equals_the_token_loop(
    channels: int, rank: int, size: int, dtype: torch.dtype, normed: bool
) -> None:
    check_decodes(triton_projected.decode, channels, rank, size, normed=normed, dtype=dtype)


def test_states_in_16_bits_follow() -> None:
    kinds = {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    check_decodes(triton_projected.decode, 16, 32, 16, normed=True, **kinds)


@NORMED
def test_has_the_bits_of_three_kernels(normed: bool) -> None:
    rank, size, rows = 48, 16, 3
    layer = Layer.random(rows, 16, rank, size, normed=normed, dtype=torch.bfloat16)
    layer = layer.as_whole_numbers()
    own = poisoned(6, 16, size)
    own[1:3] = torch.randn(2, 16, size, generator=torch.Generator().manual_seed(1))
    state = own.clone()
    slots = DecodeSlots(int64([1, 2, 0]), int64([1, 4, 5]))
    y = triton_projected.decode(layer.x, layer.z, layer.low, layer.constants, own, slots)
    projected, weight, norms, eps = layer.low
    if norms is not None:
        projected = norm.rms_norm_parts(projected, (rank, size, size), norms, eps)
    low, b, c = projected.split((rank, size, size), dim=1)
    dt = torch.cat([one_row.multiply(low[row : row + 1], weight) for row in range(rows)])
    assert len(dt.unique()) > 8
    tokens = Mamba1Tokens(layer.x, layer.z, dt, b, c)
    assert torch.equal(y, triton_decode.decode(tokens, layer.constants, state, slots))
    torch.testing.assert_close(own, state, atol=0, rtol=0, equal_nan=True)


def test_a_sequence_has_the_same_bits_beside_others() -> None:
    layer = Layer.random(3, 16, 32, 16, normed=True, dtype=torch.bfloat16)
    state = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(1))
    alone = state.clone()
    slots = DecodeSlots(*[int64([1, 2, 3])] * 2)
    y = triton_projected.decode(layer.x, layer.z, layer.low, layer.constants, state, slots)
    low = layer.low._replace(projected=layer.low.projected[1:2])
    slots = DecodeSlots(*[int64([2])] * 2)
    one = triton_projected.decode(layer.x[1:2], layer.z[1:2], low, layer.constants, alone, slots)
    assert torch.equal(one, y[1:2]) and torch.equal(alone[2], state[2])


RUNS = DecodeRuns(*[int64([0, 1])] * 8, most_unfolded=0)
FEW = DecodeSlots(*[int64([1, 2, 3, 4])] * 2)
MORE = DecodeSlots(*[int64([1, 2, 3, 4, 5])] * 2)


@pytest.mark.parametrize(
    ("plan", "channels", "rank", "size", "taken"),
    [
        (FEW, 8, 256, 16, True),
        (FEW, 8, 257, 16, False),
        (FEW, 12, 256, 16, False),
        (FEW, 8, 256, 2, False),
        (MORE, 8, 256, 16, False),
        (RUNS, 8, 256, 16, False),
    ],
)
def test_takes_few_sequences_of_sizes_that_it_is_made_for(
    plan: Any, channels: int, rank: int, size: int, taken: bool
) -> None:
    low = Layer.random(1, channels, rank, size, normed=False, dtype=torch.bfloat16).low
    state = torch.zeros(2, channels, size)
    assert triton_projected.takes(plan, low, state) == taken
    assert not triton_projected.takes(plan, low._replace(weight=low.weight.float()), state)


def test_transformer_engine_has_its_own_product_of_step_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(TransformerEngineLinear=lambda recipe, weights: object())
    monkeypatch.setattr(kernel_set, "import_transformer_engine", lambda: library)
    kernels = replace(kernel_set.REFERENCE, projected_mamba1=triton_projected)
    assert kernel_set.with_transformer_engine(kernels, None, []).projected_mamba1 is None
