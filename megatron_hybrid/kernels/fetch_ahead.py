"""Weights that are read next, on their way into the GPU's L2 cache: between two products of a few
microseconds lie kernels that leave the memory idle. Only a hint: what a kernel computes does not
depend on it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import ENABLED
from megatron_hybrid.kernels.linear.formats import Weight

# Less than half of a Hopper's L2 cache, beside what the kernels in between read.
MOST_BYTES = 16 << 20


def ahead(weight: Weight | None) -> tuple[Tensor | None, int]:
    """The arguments of `fetch_ahead` for a weight: what of it can be fetched."""
    if isinstance(weight, Tensor) and weight.dtype.itemsize == 2 and weight.is_contiguous():
        return weight, min(weight.numel(), MOST_BYTES // 2)
    return None, 0


_PIECE = tl.constexpr(2048)  # bytes that a thread asks for


@triton.jit
def fetch_ahead(weight, elements, WARPS: tl.constexpr):
    """The last programs of a kernel of so many warps ask for the first `elements` from `weight`
    [16-bit numbers] on, when the others have read what they need."""
    if ENABLED:  # from compute capability 9.0 on
        place = tl.num_programs(0) - 1 - tl.program_id(0)
        first = (place * (WARPS * 32) + tl.arange(0, WARPS * 32)) * (_PIECE // 2)
        size = tl.minimum(elements - first, _PIECE // 2) * 2 // 16 * 16
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, $2;
            }""",
            "=r,l,r",
            [(weight + first).to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
