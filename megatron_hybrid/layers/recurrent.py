"""What recurrent layers have in common: a state in each slot, a short convolution in front, and the
two ways of a step's tokens through them: decodes, one token a sequence, and prompts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments, RecurrentState
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.inputs import StateSpec
from megatron_hybrid.layers.mixer import LayerContext, Mixer, parameter
from megatron_hybrid.layers.parts import Parts, section
from megatron_hybrid.layers.step import Step, StepPart


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
        num_decodes: int,
        decode: DecodeSlots | None,
        prefill: PrefillSegments | None,
        kernels: KernelSet,
    ) -> tuple[StepPart, ...]:
        """What the kernels of this kind of layer work out on the host, once a step."""
        parts, scan = [], self.kernel(kernels)
        if decode is not None:
            slots = kernels.plan_decode(decode)
            parts.append(StepPart(slice(num_decodes), True, slots, slots))
        if prefill is not None:
            conv = kernels.conv.plan(prefill, self.conv_weight.shape[1])
            if scan is not None:
                scan = scan.plan(prefill, self.spec.kernel_chunk)
            parts.append(StepPart(slice(num_decodes, None), False, conv, scan))
        return tuple(parts)

    def state(self, step: Step) -> RecurrentState:
        return step.caches.state[self.layer]

    def convolve(self, x: Tensor, step: Step, *, silu: bool = True) -> Tensor:
        """[tokens, channels], rows may be strided -> the same, contiguous."""
        conv, parts = step.kernels.conv, step.recurrent[self.kind]
        constants = (self.conv_weight, self.conv_bias, self.state(step).conv)
        out = x.new_empty(x.shape) if len(parts) > 1 else None
        for part in parts:
            run = conv.decode if part.is_decode else conv.prefill
            if out is None:
                result: Tensor = run(x, *constants, part.conv, silu=silu)
                return result
            run(x[part.rows], *constants, part.conv, out[part.rows], silu=silu)
        assert out is not None
        return out

    def scan(
        self, step: Step, tokens: tuple[Tensor, ...], constants: tuple[Any, ...], like: Tensor
    ) -> Tensor:
        """`tokens`: the kernel's inputs that have a row for every token; `constants`: those that
        come after them, before the state. The result is shaped `like` one of the inputs."""
        kernel, parts = self.kernel(step.kernels), step.recurrent[self.kind]
        state = self.state(step).ssm
        out = like.new_empty(like.shape) if len(parts) > 1 else None
        for part in parts:
            run = kernel.decode if part.is_decode else kernel.prefill
            if out is None:
                result: Tensor = run(*tokens, *constants, state, part.scan)
                return result
            rows = (values[part.rows] for values in tokens)
            run(*rows, *constants, state, part.scan, out[part.rows])
        assert out is not None
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
