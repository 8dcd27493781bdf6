"""Attention over a paged KV cache, for decodes and prefills in one batch."""

from megatron_hybrid.kernels.paged_attention.reference import (
    AttentionPlan,
    append,
    attend,
    copy_tokens,
    plan,
)

__all__ = ["AttentionPlan", "append", "attend", "copy_tokens", "plan"]
