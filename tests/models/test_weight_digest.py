"""The digest of weights: every bit counts, and its place; how it is computed does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from megatron_hybrid.models import weight_digest as digests
from megatron_hybrid.models.weight_digest import BLOCK, multipliers, weight_digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
SIZES = (1, 3, 1001, 4 * BLOCK, 4 * BLOCK + 7)


def model(**weights: Tensor) -> nn.Module:
    made = nn.Module()
    for name, weight in weights.items():
        made.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return made


def weight(size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_one_bit_changes_it_and_put_back_it_is_the_old_one(size: int, dtype: torch.dtype) -> None:
    values = weight(size, dtype)
    made, raw = model(a=values, b=torch.ones(5)), values.view(torch.uint8)
    old, seen = weight_digest(made), set()
    for place in {0, len(raw) // 2, len(raw) - 1}:
        for bit in (0, 7):
            raw[place] ^= 1 << bit
            seen.add(weight_digest(made))
            raw[place] ^= 1 << bit
    assert old not in seen and len(seen) == 2 * len({0, len(raw) // 2, len(raw) - 1})
    assert weight_digest(made) == old


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_two_weights_that_swap_places_change_it(dtype: torch.dtype) -> None:
    values = torch.ones(2 * BLOCK * 4 // dtype.itemsize, dtype=dtype)
    made, last = model(a=values), len(values) - 1
    places = [0, 1, 2, 3, 64, 65, 1 << 12, (1 << 17) + 1, last // 2 - 1, last // 2 + 1, last]
    seen = set()
    for here, there in [*pairwise(places), (0, last), (1, 64), (3, 1 << 12)]:
        for value in (-1, 2):  # one differs in its upper bit, the other in more
            values[here] = value
            one = weight_digest(made)
            values[here], values[there] = values[there].item(), value
            seen |= {one}
            assert weight_digest(made) != one, (here, there)
            values[there] = 1


def test_no_swap_of_two_lanes_keeps_the_sum() -> None:
    """What its docstring says of multipliers: the lower bits tell any two apart."""
    table = multipliers()
    assert (table % 2 == 1).all()
    lower = table & (2 * BLOCK - 1)
    assert len(set(lower.tolist())) == BLOCK  # so that no difference is a multiple of 2 * BLOCK
    assert 31 + digests.BLOCK_BITS < 64


def test_names_types_and_shapes_are_in_it() -> None:
    values = weight(24, torch.float32)
    zeros = torch.zeros(3)
    made = [
        model(a=values),
        model(b=values),
        model(a=values.view(4, 6)),
        model(a=values.view(torch.int32)),
        model(a=values[:12], b=values[12:]),
        model(a=values[:12], b=values[12:], c=zeros),
        model(a=values[:12], b=values[12:], c=zeros[:2]),
        model(a=values[:12], b=values[12:], c=zeros[:0]),
    ]
    assert len({weight_digest(one) for one in made}) == len(made)


def test_buffers_are_in_it() -> None:
    made = model(a=torch.ones(3))
    made.register_buffer("frequencies", torch.ones(4), persistent=False)
    old = weight_digest(made)
    made.frequencies[2] += 1  # type: ignore[index, operator]
    assert weight_digest(made) != old


@pytest.mark.parametrize("blocks_at_once", [1, 2, 3, 100])
def test_the_size_of_chunks_does_not_change_it(blocks_at_once: int) -> None:
    made = model(a=weight(5 * BLOCK + 3, torch.float32), b=weight(11, torch.bfloat16))
    assert weight_digest(made, blocks_at_once) == weight_digest(made)


def test_the_way_of_a_gpu_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(a=weight(3 * BLOCK + 3, torch.float32), b=weight(11, torch.bfloat16))
    ours = weight_digest(made)
    monkeypatch.setattr(digests, "_weighed", lambda lanes, table: (lanes * table).sum(1))
    assert weight_digest(made) == ours


def test_a_weight_that_lies_across_or_at_an_odd_place_is_read_all_the_same() -> None:
    values = weight(999, torch.float32).view(27, 37)
    across = values.T.contiguous().T
    assert not across.is_contiguous()
    assert weight_digest(model(a=across)) == weight_digest(model(a=values))
    odd = weight(1001, torch.int8)[1:]
    assert weight_digest(model(a=odd)) == weight_digest(model(a=odd.clone()))


def test_it_is_what_plain_integers_give() -> None:
    values = weight(BLOCK + 2, torch.float32)
    lanes, table = values.view(torch.int32).tolist(), multipliers().tolist()
    sums = [
        sum(lane * factor for lane, factor in zip(part, table, strict=False)) % 2**64
        for part in (lanes[:BLOCK], lanes[BLOCK:])
    ]
    ours = digests.block_sums(values, torch.from_numpy(multipliers()))
    assert [one % 2**64 for one in ours.tolist()] == sums
