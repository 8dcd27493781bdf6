"""Quantised weights as files hold them: what is stored for a weight [N, K], and what that means.

Written from the formats' descriptions alone: nothing here is shared with the engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The magnitudes of a 4-bit float (two bits of exponent, one of mantissa), by its low three bits.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# AWQ: the column of its eight that each nibble of a word holds, from the lowest.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored(NamedTuple):
    """A weight's tensors by the last part of their names, and the float32 [N, K] they stand for."""

    tensors: dict[str, Tensor]
    meaning: Tensor


class Scaled(NamedTuple):
    """Numbers of a narrow format, a scale [N / rows, K / columns] for each block of them."""

    numbers: Tensor  # [N, K]
    scale: Tensor
    meaning: Tensor  # float32 [N, K]


class Grouped(NamedTuple):
    """Unsigned integers; column k belongs to group `g_idx[k]`."""

    numbers: Tensor  # [N, K], from 0
    scale: Tensor  # [N, groups]
    zero: Tensor  # [N, groups]: the integer that means 0
    g_idx: Tensor  # [K]
    meaning: Tensor  # float32 [N, K]


def fp8(weight: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Scaled:
    """e4m3, a scale of `dtype` for each block of rows x columns, of which the last are ragged."""
    scale = (_amax(weight, rows, columns) / E4M3_MAX).to(dtype)
    wide = _spread(scale, rows, columns, weight)
    numbers = (weight / wide).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return Scaled(numbers, scale, _product(numbers, wide))


def int8(weight: Tensor, dtype: torch.dtype) -> Scaled:
    """A scale [N, 1] for each row."""
    scale = (_amax(weight, 1, weight.shape[1]) / 127).to(dtype)
    numbers = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return Scaled(numbers, scale, _product(numbers, scale))


def nvfp4(weight: Tensor, *, reciprocal: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of e2m1 [N, K / 2], the even column in the low nibble; e4m3 scales [N, K / 16]; the
    float32 scale of the scales, or with `reciprocal` what divides them; and the meaning."""
    whole = weight.abs().amax() / (6 * E4M3_MAX)
    whole = (1 / whole if reciprocal else whole).float()
    unit = 1 / whole if reciprocal else whole
    scale = (_amax(weight, 1, 16) / 6 / unit).clamp(max=E4M3_MAX).to(E4M3)
    wide = _spread(scale.double(), 1, 16, weight)
    wide = wide / whole.double() if reciprocal else wide * whole.double()
    edges = (E2M1[1:] + E2M1[:-1]) / 2
    codes = torch.bucketize((weight.abs() / wide).float(), edges)
    sign = (weight < 0).long()
    meaning = (E2M1.double()[codes] * (1 - 2 * sign) * wide).float()
    codes = codes + 8 * sign
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), scale, whole, meaning


def integers(
    weight: Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    *,
    symmetric: bool,
    g_idx: Tensor | None = None,
) -> Grouped:
    """Integers of 4 or 8 bits in groups of `group` columns with scales of `dtype`. `g_idx`: the
    groups' columns where they are not neighbours. No zero is 0, which GPTQ's first version, that
    stores one less, cannot say."""
    largest = 2**bits - 1
    if g_idx is None:
        g_idx = torch.arange(weight.shape[1]) // group
    in_groups = weight[:, g_idx.argsort(stable=True)].unflatten(1, (-1, group))
    if symmetric:
        scale = (2 * in_groups.abs().amax(2) / largest).to(dtype)
        zero = torch.full_like(scale, (largest + 1) // 2)
    else:
        high = in_groups.amax(2).clamp(min=0)
        low = torch.minimum(in_groups.amin(2), -high / (largest - 1))
        scale = ((high - low) / largest).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, largest)
    wide, zeros = scale.float()[:, g_idx], zero.float()[:, g_idx]
    numbers = ((weight / wide).round() + zeros).clamp(0, largest)
    meaning = _product(numbers - zeros, wide)
    return Grouped(numbers.long(), scale, zero.long(), g_idx, meaning)


def shuffled_groups(columns: int, group: int) -> Tensor:
    """A g_idx [K] whose groups are of any columns, as where GPTQ ordered them by activation."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return order // group


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned integers [..., M] as int32 [..., M * bits / 32], the first one lowest."""
    shifts = torch.arange(0, 32, bits)
    words = (numbers.unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(numbers: Grouped, bits: int, *, first_version: bool) -> Stored:
    zero = numbers.zero - 1 if first_version else numbers.zero
    tensors = {
        "qweight": pack(numbers.numbers, bits).T,
        "qzeros": pack(zero.T, bits),
        "scales": numbers.scale.T,
        "g_idx": numbers.g_idx.to(torch.int32),
    }
    return Stored(tensors, numbers.meaning)


def awq(numbers: Grouped) -> Stored:
    def packed(columns: Tensor) -> Tensor:  # [rows, N]
        return pack(columns.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    tensors = {
        "qweight": packed(numbers.numbers.T),
        "qzeros": packed(numbers.zero.T),
        "scales": numbers.scale.T,
    }
    return Stored(tensors, numbers.meaning)


def _amax(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude in each block."""
    height, width = weight.shape
    padded = F.pad(weight.abs(), (0, -width % columns, 0, -height % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def _spread(scale: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    """The scale of each number [N, K]."""
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: like.shape[0], : like.shape[1]]


def _product(numbers: Tensor, scale: Tensor) -> Tensor:
    """Rounded to float32 once."""
    return (numbers.double() * scale.double()).float()
