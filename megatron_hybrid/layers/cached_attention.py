"""What a layer with a KV cache is to the model, whatever it keeps there."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.paged_attention.protocol import PagedKernel
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.layers.inputs import KVSpec, LayerCaches, StepInputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, Mixer
from megatron_hybrid.layers.rope import RopeConfig


class CachedAttention(Mixer):
    """`kind` names the layers that share their plans, and `rope`. `key_role`: the weight that makes
    keys, by a head's rows for a head that is cached.

    `k_scale`, `v_scale`: what keys and values in FP8 are stored by (see KVCache). They are the
    checkpoint's that is loaded at first: what is cached stays as it is when new weights come.
    """

    kind: str
    key_role: ClassVar[str]

    def __init__(self, context: LayerContext, rope: RopeConfig | None) -> None:
        super().__init__()
        self.rope = rope
        self.layer = context.layer
        self.dtype, self.kv_dtype = context.dtype, context.kv_dtype
        self.parallel = context.parallel
        self.k_scale = self.v_scale = 1.0

    @property
    def attention(self) -> CachedAttention:
        return self

    @abstractmethod
    def scale_by(self, k_scale: float, v_scale: float) -> None:
        """Store keys and values, which are in FP8, by these scales of a checkpoint."""

    @abstractmethod
    def kv_spec(self) -> KVSpec:
        """Of its cache on this rank."""

    @abstractmethod
    def shape(self, block_size: int) -> AttentionShape:
        """What the kernels need to know of every layer of its kind."""

    @property
    @abstractmethod
    def pair_size(self) -> int:
        """Numbers of all heads' keys on this rank, or values: a query that sees a key takes four
        times as many operations."""

    @abstractmethod
    def kernel(self, kernels: KernelSet) -> PagedKernel:
        """Of these the one that computes it."""

    def most_captured(self, kernels: KernelSet, block_size: int, prompts: int) -> int:
        """As of PagedKernel, of this layer. With an index none: what is launched for texts that fit
        its budget is not what others need, and a captured step cannot tell."""
        shape = self.shape(block_size)
        return 0 if shape.index is not None else self.kernel(kernels).most_captured(shape, prompts)

    def plan(self, inputs: StepInputs, caches: LayerCaches, kernels: KernelSet) -> Plan:
        """What its kernels work out on the host, once a step for all layers of its kind."""
        shape = self.shape(caches.kv[self.layer].key.shape[1])
        paged = inputs.paged if not shape.window or inputs.window is None else inputs.window
        every = self.kernel(kernels).plan(paged, shape)
        if shape.index is None:
            return every
        return kernels.indexed_attention.plan(paged, shape, every)

    @abstractmethod
    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """Write the keys and values of tokens [tokens, hidden], and attend to nothing."""
