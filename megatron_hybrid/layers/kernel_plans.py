"""What all layers of one step share, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.layers.inputs import LayerCaches


class PartKind(Enum):
    """Which call of a Recurrence computes a part of a step."""

    DECODE = auto()  # one token a sequence
    RUNS = auto()  # one token and drafts
    PREFILL = auto()
    REPLAY = auto()  # of a Replay, which computes all of them


class StepPart(NamedTuple):
    """The decodes of a step, or its prompts, as one kind of recurrent layer computes them."""

    rows: slice  # of the step's tokens
    kind: PartKind
    conv: Plan  # None where a layer has no convolution
    scan: Plan  # None where a layer has a convolution only


@dataclass(slots=True)
class Carried:
    """What a CarriedRouter hands to that of the next layer: [rows, size]; None before the first."""

    states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KernelPlans:
    """The kernels and their plans, of those kinds of layers that the model has."""

    caches: LayerCaches
    kernels: KernelSet
    # By kind of attention, of which one without positions has no rotation.
    attention: Mapping[str, Plan] = field(default_factory=dict)
    rotation: Mapping[str, Plan] = field(default_factory=dict)  # of the step's positions
    positions: Tensor | None = None  # [tokens], absolute; None where no token is real
    token_ids: Tensor | None = None  # [tokens]
    # By kind of layer: one part, or the decodes and then the prompts.
    recurrent: Mapping[str, tuple[StepPart, ...]] = field(default_factory=dict)
    embeddings: Tensor | None = None  # [tokens, hidden], for blocks that read them again
    # Of the lockstep group's replicas, at this point of the model: see LockstepSize.
    most_tokens: int = 0
    all_to_all: bool = False
    carried: Carried | None = None  # from router to router
    # Takes the experts [tokens, chosen] that each layer's router chooses; None: nobody wants them.
    chosen: list[Tensor] | None = None
