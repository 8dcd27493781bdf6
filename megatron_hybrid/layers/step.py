"""What all layers of one step share, computed once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d import ConvPlan
from megatron_hybrid.kernels.mamba2_scan import ScanPlan
from megatron_hybrid.kernels.paged_attention import AttentionPlan
from megatron_hybrid.kernels.slots import DecodePlan
from megatron_hybrid.layers.inputs import LayerCaches


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Plans of the two kernels of a Mamba2 layer."""

    conv: ConvPlan
    scan: ScanPlan


@dataclass(frozen=True, slots=True)
class Step:
    """A plan is None where the step or the model has no use for it."""

    caches: LayerCaches
    num_decodes: int
    attention: AttentionPlan | None
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    rotation: tuple[Tensor, Tensor] | None  # cosines and sines, [tokens, 1, rotary_dim] each
