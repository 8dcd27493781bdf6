"""Adapters' products of a GPU in batch-invariant mode."""

from __future__ import annotations

from megatron_hybrid.kernels.lora.triton import add
from megatron_hybrid.kernels.lora.triton_wide import multiply_in_order as multiply

__all__ = ["add", "multiply"]
