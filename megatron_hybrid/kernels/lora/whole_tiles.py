"""reference.py on products of whole tiles, of which a row's bits do not depend on those beside it:
see linear/whole_tiles.py."""

from __future__ import annotations

from functools import partial

from megatron_hybrid.kernels.linear.whole_tiles import linear
from megatron_hybrid.kernels.lora import reference

__all__ = ["add", "multiply"]

add = partial(reference.add, linear=linear)
multiply = partial(reference.multiply, product=linear)
