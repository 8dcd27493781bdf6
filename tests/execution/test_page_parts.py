"""Rows in 8 bits: how far they may be away, and where they lie."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.execution.host_copies import HostCopier
from megatron_hybrid.execution.page_parts import HostForm, PageParts, RoundedPart
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.layers.inputs import KVSpec, StateSpec, allocate_caches

# A step of int8 is 1 / 127 of the largest of a group; FP8 has 3 bits behind the first one, and
# below 2**-6 steps of 2**-9, of 448.
NUMBERS = {torch.int8: (1 / 127 / 2, 0.0), FP8: (2**-9 / 448 / 2, 2**-4)}


def rounded(rows: torch.Tensor, dtype: torch.dtype, over: tuple[int, ...]) -> RoundedPart:
    part = RoundedPart(rows, dtype=dtype, over=over)
    word = torch.int32 if part.row_bytes % 4 == 0 else torch.int8
    placed = part.in_words(word, 0)
    assert isinstance(placed, RoundedPart)
    return placed


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("over", [(1, 3), (2,), (3,)])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_rows_come_back_nearly(
    dtype: torch.dtype, over: tuple[int, ...], stored: torch.dtype
) -> None:
    # Always the same: of 100 draws one has a number below 1e-6, where float16's steps are larger
    # than the bound knows.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 8, 3, 16, generator=generator) * torch.logspace(-3, 3, 3)[:, None]
    rows[1, :, 1] = 0
    rows = rows.to(stored)
    before, part = rows.clone(), rounded(rows, dtype, over)
    words = part.take(torch.tensor([1, 4]))
    assert words.shape == (2, part.width) and part.end == part.width
    assert words.element_size() * words.shape[1] == part.row_bytes
    groups = math.prod(rows.shape[1:]) // math.prod(rows.shape[dim] for dim in over)
    assert part.row_bytes == rows[0].numel() + 4 * groups
    assert torch.equal(part.take(slice(4, 5)), words[1:])
    part.put(torch.tensor([5, 0]), words)
    part.put(slice(2, 3), words[:1])
    exact = before[[1, 4]].double()
    of_largest, of_each = NUMBERS[dtype]
    bound = exact.abs().amax(over, keepdim=True) * of_largest + exact.abs() * of_each
    bound += exact.abs() * torch.finfo(stored).eps
    found = rows[[5, 0]].double()
    assert ((found - exact).abs() <= bound * (1 + 1e-5)).all()
    assert torch.equal(rows[2], rows[5]) and not rows[5, :, 1].any()
    for untouched in (1, 3, 4):
        assert torch.equal(rows[untouched], before[untouched])
    # Once rounded they stay what they are, but for the scale's own rounding.
    part.put(torch.tensor([1]), part.take(torch.tensor([5])))
    again = rows[1].double()
    assert torch.allclose(again, found[0], rtol=4 * torch.finfo(stored).eps, atol=0)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_none_afterwards(dtype: torch.dtype, bad: float) -> None:
    rows = torch.randn(3, 4, 2, 4)
    rows[0, 1, 1, 2] = bad
    part = rounded(rows, dtype, (1, 3))
    part.put(slice(2, 3), part.take(slice(0, 1)))
    assert rows[2, :, 0].isfinite().all() and rows[2, :, 1].isnan().all()


@pytest.mark.parametrize("kv", [FP8, None])
@pytest.mark.parametrize("states", [torch.int8, None])
def test_pages_hold_either_form(kv: torch.dtype | None, states: torch.dtype | None) -> None:
    """Convolutions' windows and logits are as they were."""
    spec = StateSpec((6, 3), torch.bfloat16, (2, 4, 8), torch.float32, 4, scaled_over=-1)
    none = StateSpec((5, 2), torch.bfloat16, (0,), torch.float32, 1)
    caches = allocate_caches(
        {5: KVSpec(2, 8, torch.bfloat16)}, {1: spec, 3: none}, 9, 4, 5, torch.device("cpu"), 11
    )
    keys, state = caches.kv[5], caches.state[1]
    for tensor in (keys.key, keys.value, state.conv, state.ssm, caches.end_logits):
        tensor.copy_(torch.randn(tensor.shape))
    caches.state[3].conv.copy_(torch.randn(5, 5, 2))
    form = HostForm(kv, states, {1: -1, 3: -2})
    sizes = PageParts.of(caches, form).sizes
    assert sizes[0] == 2 * (4 * 2 * 8 + 4 * 2 if kv else 2 * 4 * 2 * 8)
    ssm = 2 * 4 * 8 + 4 * 2 * 4 if states else 4 * 2 * 4 * 8
    assert sizes[1] == 2 * 6 * 3 + ssm + 2 * 5 * 2 + 4 * 11
    page = PageParts.of(caches, form).page_bytes(3)
    copier = HostCopier(caches, 12, page, form)
    copier.write(Copy([1, 2], [7, 3], 1, [5, 9, 2]))
    copier.fetch(Copy([6, 5], [7, 3], 4, [5, 9, 2]))
    for tensor in (keys.key, keys.value):
        near = 0.07 if kv else 0
        assert torch.allclose(tensor[[6, 5]], tensor[[1, 2]], rtol=near, atol=near / 100)
        assert torch.equal(tensor[[6, 5]], tensor[[1, 2]]) == (kv is None)
    for exact in (state.conv, caches.state[3].conv, caches.end_logits):
        assert torch.equal(exact[4], exact[1])
    assert torch.allclose(state.ssm[4], state.ssm[1], rtol=0, atol=0.02 if states else 0)
    assert torch.equal(state.ssm[4], state.ssm[1]) == (states is None)
