"""Rotary position embedding with flashinfer's kernel; the calls are protocols.Rope's.

The kernel looks cosines and sines up by position; here its table is computed for the step's own
tokens, from the model's (scaled) frequencies, so token i looks up row i.
"""

from __future__ import annotations

from typing import NamedTuple

import flashinfer
import torch
from torch import Tensor

from megatron_hybrid.kernels.rope import reference


class RopePlan(NamedTuple):
    """Of a step's tokens."""

    table: Tensor  # [tokens, rotary_dim] float32: cosines, then sines
    rows: Tensor  # [tokens] int32: 0, 1, 2, ...


def plan(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> RopePlan:
    """positions [tokens], frequencies [rotary_dim / 2] float32 -> the table, once a step."""
    angles = positions[:, None].float() * frequencies
    rows = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    return RopePlan(torch.cat((angles.cos(), angles.sin()), dim=1), rows)


def rotate(x: Tensor, plan: RopePlan) -> Tensor:
    """As in Rope; in x's place where flashinfer can do it."""
    tokens, heads, head_dim = x.shape
    rotary_dim = plan.table.shape[1]
    aligned = x.stride(1) == head_dim and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if (
        x.dtype not in (torch.bfloat16, torch.float16)
        or head_dim not in (64, 128, 256)
        or rotary_dim % 16
        or heads == 1
        or not aligned
    ):
        cosine, sine = plan.table.to(x.dtype).chunk(2, dim=1)
        signed = torch.cat((-sine, sine), dim=1)
        return reference.rotate(x, (torch.cat((cosine, cosine), dim=1)[:, None], signed[:, None]))
    if tokens:
        # It takes queries and keys, which are all heads to us: any split will do.
        first, second = x.tensor_split([heads // 2], dim=1)
        flashinfer.apply_rope_with_cos_sin_cache_inplace(
            plan.rows, first.flatten(1), second.flatten(1), head_dim, plan.table, is_neox=True
        )
    return x
