"""Attention sinks inside of attention's kernels in Triton: see Attention. A sink enters once,
however a query's keys are split: where they are put together, or before the first of them."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_sinks(sinks, token, head, inside, stride):
    """Of rows [ROWS]: their scores [ROWS] float32, times log2(e). stride: of a token's."""
    return tl.load(sinks + token * stride + head, mask=inside, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def with_sinks(most, total, result, sinks, token, head, inside, stride):
    """The sum of weights [ROWS], and the weighted values [ROWS, DIMS], of rows whose largest score
    is `most`, with their sinks; sinks: None: there are none."""
    if sinks is not None:
        sink = load_sinks(sinks, token, head, inside, stride)
        larger = tl.maximum(most, sink)
        shrink = tl.exp2(most - larger)
        total = tl.fma(total, shrink, tl.exp2(sink - larger))
        result = result * shrink[:, None]
    return total, result
