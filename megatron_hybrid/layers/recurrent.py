"""What recurrent layers have in common: a state in each slot, a short convolution in front, and the
ways of a step's tokens through them: decodes, with drafts or without, and prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    DecodeSlots,
    PrefillSegments,
    RecurrentState,
)
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.inputs import RecurrentRings, StateSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans, PartKind, StepPart
from megatron_hybrid.layers.mixer import LayerContext, Mixer, parameter
from megatron_hybrid.layers.parts import Parts, section


class RecurrentMixer(Mixer):
    """`kind` names the layers that share their plans. A subclass sets `spec`, and gives `kernel`
    where it has more than a convolution."""

    kind: ClassVar[str]
    takes_chunk_bounds: ClassVar[bool] = False  # whether its kernels read cu_chunk_seqlens
    spec: StateSpec

    def __init__(
        self, context: LayerContext, conv_sections: list[int], width: int, bias: bool
    ) -> None:
        """`conv_sections`: this rank's channels of the convolution, by where they come from."""
        super().__init__()
        self.layer = context.layer
        self.parallel = context.parallel
        self.conv_sections = conv_sections
        channels = sum(conv_sections)
        self.conv_weight = parameter((channels, width), context.dtype)
        self.conv_bias = parameter((channels,), context.dtype) if bias else None

    @property
    def recurrent(self) -> RecurrentMixer:
        return self

    def kernel(self, kernels: KernelSet) -> Any:
        """The scan of this kind of layer; None without one."""
        return None

    def plan(
        self,
        num_decode_tokens: int,
        decode: DecodeSlots | DecodeRuns | None,
        prefill: PrefillSegments | None,
        kernels: KernelSet,
        ring_length: int = 0,
    ) -> tuple[StepPart, ...]:
        """What the kernels of this kind of layer work out on the host, once a step."""
        parts, scan = [], self.kernel(kernels)
        width, decodes = self.conv_weight.shape[1], slice(num_decode_tokens)
        if isinstance(decode, DecodeRuns):
            conv = kernels.conv.plan_runs(decode, width, ring_length)
            runs = None if scan is None else kernels.plan_runs(decode, ring_length)
            parts.append(StepPart(decodes, PartKind.RUNS, conv, runs))
        elif decode is not None:
            slots = kernels.plan_decode(decode)
            parts.append(StepPart(decodes, PartKind.DECODE, slots, slots))
        if prefill is not None:
            conv = kernels.conv.plan(prefill, width)
            if scan is not None:
                scan = scan.plan(prefill, self.spec.kernel_chunk)
            parts.append(StepPart(slice(num_decode_tokens, None), PartKind.PREFILL, conv, scan))
        return tuple(parts)

    def state(self, plans: KernelPlans) -> RecurrentState:
        return plans.caches.state[self.layer]

    def convolve(self, x: Tensor, plans: KernelPlans, *, silu: bool = True) -> Tensor:
        """[tokens, channels], rows may be strided -> the same, contiguous."""
        conv, state = plans.kernels.conv, self.state(plans).conv
        weights = (self.conv_weight, self.conv_bias)

        def compute(part: StepPart, rows: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
            run = getattr(conv, part.kind.value)
            rings = [ring.conv for ring in self._rings(part, plans)]
            result: Tensor = run(*rows, *weights, state, *rings, part.conv, out, silu=silu)
            return result

        return self._by_part(plans, (x,), x, compute)

    def scan(
        self,
        plans: KernelPlans,
        tokens: tuple[Tensor, ...],
        constants: tuple[Any, ...],
        like: Tensor,
    ) -> Tensor:
        """`tokens`: the kernel's inputs that have a row for every token; `constants`: those that
        come after them, before the state. The result is shaped `like` one of the inputs."""
        kernel, state = self.kernel(plans.kernels), self.state(plans).ssm

        def compute(part: StepPart, rows: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
            run = getattr(kernel, part.kind.value)
            rings = [ring.inputs for ring in self._rings(part, plans)]
            result: Tensor = run(*rows, *constants, state, *rings, part.scan, out)
            return result

        return self._by_part(plans, tokens, like, compute)

    def _rings(self, part: StepPart, plans: KernelPlans) -> tuple[RecurrentRings, ...]:
        """What only runs take: theirs, else none."""
        return (plans.caches.rings[self.layer],) if part.kind is PartKind.RUNS else ()

    def _by_part(
        self,
        plans: KernelPlans,
        tokens: tuple[Tensor, ...],
        like: Tensor,
        compute: Callable[[StepPart, tuple[Tensor, ...], Tensor | None], Tensor],
    ) -> Tensor:
        """Each part of the step computes its own rows."""
        parts = plans.recurrent[self.kind]
        if len(parts) == 1:
            return compute(parts[0], tokens, None)
        out = like.new_empty(like.shape)
        for part in parts:
            compute(part, tuple(values[part.rows] for values in tokens), out[part.rows])
        return out

    def conv_parts(self, name: str, starts: list[int], total: int) -> Parts:
        """The convolution's weights, `name`d so in a checkpoint that has `total` channels, where
        this rank's sections begin at `starts`."""
        weights = [("weight", self.conv_weight[:, None])]
        if self.conv_bias is not None:
            weights.append(("bias", self.conv_bias))
        for kind, target in weights:
            sections = target.split(self.conv_sections)
            for rows, start in zip(sections, starts, strict=True):
                yield section(f"{name}.{kind}", rows, 0, start, total)

    def after_loading(self) -> None:
        """What is made from the weights, again after new ones; what is in place stays there."""
        if self.conv_weight.is_cuda:  # channels side by side, as in the activations
            self.conv_weight.data = self.conv_weight.t().contiguous().t()
