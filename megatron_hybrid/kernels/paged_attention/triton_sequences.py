"""Whose a step's tokens are, and its blocks, found by a program on the device."""

from __future__ import annotations

import triton
import triton.language as tl

_SEQUENCES = tl.constexpr(128)  # that are searched at the same time


@triton.jit
def sequence_of(number, starts, sequences):
    """The sequence that a token or a block belongs to, which is no padding; those of sequence s
    begin at starts[s]."""
    found = -1
    for begin in range(0, sequences, _SEQUENCES):
        sequence = begin + tl.arange(0, _SEQUENCES)
        first = tl.load(starts + sequence, mask=sequence < sequences, other=2147483647)
        found += tl.sum((first <= number).to(tl.int32), 0)
    return found
