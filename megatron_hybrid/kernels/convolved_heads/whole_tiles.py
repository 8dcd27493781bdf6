"""reference.py on products of whole tiles: see linear/whole_tiles.py."""

from __future__ import annotations

from functools import partial

from megatron_hybrid.kernels.convolved_heads import reference
from megatron_hybrid.kernels.linear.whole_tiles import multiply

mix = partial(reference.mix, product=multiply)
