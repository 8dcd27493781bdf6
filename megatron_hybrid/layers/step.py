"""What all layers of one step share, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.inputs import LayerCaches


@dataclass(frozen=True, slots=True)
class Step:
    """The kernels and their plans. A plan is None where the step or the model has no use for it."""

    caches: LayerCaches
    kernels: KernelSet
    num_decodes: int
    attention: Any = None
    rotation: Any = None  # of the step's positions
    decode: Any = None  # of both kernels of a recurrent layer
    conv: Any = None
    scan: Any = None
