"""Attention and Mamba2 on the same input, their results added (Falcon-H1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.attention import AttentionConfig, GroupedQueryAttention
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mixer import LayerContext, Mixer
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class SideBySideConfig:
    """Of both."""

    attention: AttentionConfig
    mamba: Mamba2Config

    def mixer(self, context: LayerContext) -> SideBySide:
        """As in LayerConfig."""
        return SideBySide(self, context)


class SideBySide(Mixer):
    """Both read the block's normed input; the block adds up what they give."""

    def __init__(self, config: SideBySideConfig, context: LayerContext) -> None:
        super().__init__()
        self.self_attn = config.attention.mixer(context)
        self.mamba = config.mamba.mixer(context)

    @property
    def attention(self) -> GroupedQueryAttention:
        return self.self_attn

    @property
    def recurrent(self) -> RecurrentMixer:
        return self.mamba

    @property
    def reader(self) -> Reader | None:
        mine, other = self.mamba.reader, self.self_attn.reader
        if mine is None or other is None or mine.format.activations == "tensor":
            return None
        alike = replace(mine.format, rows=1) == replace(other.format, rows=1)
        return mine._replace(plain=mine.plain or other.plain) if alike else None

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.mamba(x, plans) + self.self_attn(x, plans)
