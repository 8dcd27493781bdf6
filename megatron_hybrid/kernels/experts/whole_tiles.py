"""reference.py on products of whole tiles: see linear/whole_tiles.py. What a token's experts give
is added up in the order of their numbers."""

from __future__ import annotations

from functools import partial

from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.reference import add_norm_route, takes_shared
from megatron_hybrid.kernels.linear.whole_tiles import multiply

__all__ = ["add_norm_route", "add_shared", "mix", "mix_parts", "route", "takes_shared"]

route = partial(reference.route, product=multiply)
mix = mix_parts = partial(reference.mix, product=multiply)
add_shared = partial(reference.add_shared, product=multiply)
