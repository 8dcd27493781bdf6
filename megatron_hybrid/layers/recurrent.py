"""What recurrent layers have in common: a state in each slot, most often a short convolution before
it, and the ways of a step's tokens through them: decodes, with drafts or without, and prompts."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    DecodeSlots,
    PrefillSegments,
    RecurrentState,
)
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import (
    AScansTokens,
    ConvConstants,
    Gates,
    Plan,
    Reader,
)
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.kernels.state_rounding.reference import layer_seed
from megatron_hybrid.layers.inputs import StateSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans, PartKind, StepPart
from megatron_hybrid.layers.linear import ColumnParallelLinear
from megatron_hybrid.layers.mixer import LayerContext, Mixer, parameter
from megatron_hybrid.layers.parts import Parts, Rows, sections
from megatron_hybrid.layers.rope import RopeConfig

Tokens = TypeVar("Tokens")
Constants = TypeVar("Constants")
Ring = TypeVar("Ring")


class RecurrentMixer(Mixer):
    """`kind` names the layers that share their plans, and `rope`, where they have positions. A
    subclass gives `kernel` where it has more than a convolution, and most have an `in_proj`, which
    their input goes through first."""

    kind: ClassVar[str]
    rope: RopeConfig | None = None
    takes_chunk_bounds: ClassVar[bool] = False  # whether its kernels read cu_chunk_seqlens

    def __init__(
        self,
        context: LayerContext,
        conv_sections: list[int],
        width: int = 1,
        bias: bool = False,
        *,
        state: tuple[int, ...] = (0,),
        inputs: tuple[tuple[int, ...], ...] = (),
        kernel_chunk: int = 1,
        scaled_over: int = -2,
    ) -> None:
        """`conv_sections`: this rank's channels of the convolution, by where they come from; none:
        there is no convolution. `state`, `inputs`: the shapes of the recurrence's, and
        `scaled_over`: see StateSpec."""
        super().__init__()
        if conv_sections and width < 2:
            raise ConfigurationError(
                f"The model's short convolutions have a width of {width}, which is not supported; "
                "it must be at least 2."
            )
        self.layer = context.layer
        self.parallel = context.parallel
        self.input_size = context.hidden_size  # numbers of a token that go in
        self.conv_sections = conv_sections
        channels = sum(conv_sections)
        self.conv_weight = parameter((channels, width), context.dtype)
        self.conv_bias = parameter((channels,), context.dtype) if bias else None
        self.spec = StateSpec(
            conv_shape=(channels, width - 1),
            conv_dtype=context.conv_states_dtype,
            ssm_shape=state,
            ssm_dtype=context.ssm_states_dtype,
            kernel_chunk=context.replay_chunk or kernel_chunk,
            inputs_shapes=inputs,
            inputs_dtype=context.dtype,
            scaled_over=scaled_over,
        )

    @property
    def recurrent(self) -> RecurrentMixer:
        return self

    @property
    def reader(self) -> Reader | None:
        own = self._modules.get("in_proj")
        return own.reader if isinstance(own, ColumnParallelLinear) else None

    @property
    def has_conv(self) -> bool:
        """Whether it has a convolution."""
        return bool(self.conv_sections)

    @property
    def state_runs(self) -> tuple[list[tuple[int, int]], int] | None:
        """Of the convolution's channels those that this rank has, as runs (first, count), and how
        many all ranks have; None: as of the weights that conv_parts names."""
        return None

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        """The scan of this kind of layer, a Scan or a Replay; None without one."""
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
        if kernels.replays is not None:
            return self._plan_replays(
                num_decode_tokens, decode, prefill, kernels.replays, ring_length
            )
        parts: list[StepPart] = []
        scan = self.kernel(kernels)
        width, decodes = self.conv_weight.shape[1], slice(num_decode_tokens)
        conv: Plan = None
        if isinstance(decode, DecodeRuns):
            if self.has_conv:
                conv = kernels.conv.plan_runs(decode, width, ring_length)
            runs = None if scan is None else kernels.plan_runs(decode, ring_length)
            parts.append(StepPart(decodes, PartKind.RUNS, conv, runs))
        elif decode is not None:
            slots = kernels.plan_decode(decode)
            parts.append(StepPart(decodes, PartKind.DECODE, slots, slots))
        if prefill is not None:
            conv = kernels.conv.plan(prefill, width) if self.has_conv else None
            chunks = None if scan is None else scan.plan(prefill, self.spec.kernel_chunk)
            parts.append(StepPart(slice(num_decode_tokens, None), PartKind.PREFILL, conv, chunks))
        return tuple(parts)

    def _plan_replays(
        self,
        num_decode_tokens: int,
        decode: DecodeSlots | DecodeRuns | None,
        prefill: PrefillSegments | None,
        kernels: Replays,
        ring_length: int,
    ) -> tuple[StepPart, ...]:
        """`plan` in batch-invariant mode."""
        assert not isinstance(decode, DecodeSlots), "states are written on the grid alone"
        scan, width, chunk = self.kernel(kernels), self.conv_weight.shape[1], self.spec.kernel_chunk
        parts: list[StepPart] = []
        for rows, part in (
            (slice(num_decode_tokens), decode),
            (slice(num_decode_tokens, None), prefill),
        ):
            if part is not None:
                conv: Plan = None
                if self.has_conv:
                    conv = kernels.conv.plan(part, chunk, width, ring_length)
                scans = None if scan is None else scan.plan(part, chunk, ring_length)
                parts.append(StepPart(rows, PartKind.REPLAY, conv, scans))
        return tuple(parts)

    def state(self, plans: KernelPlans) -> RecurrentState:
        """The layer's states in all slots."""
        return plans.caches.state[self.layer]

    def rounding_seed(self, plans: KernelPlans) -> int | None:
        """Of the recurrence's constants: see RoundsStates."""
        seed = plans.caches.rounding_seed
        return None if seed is None else layer_seed(seed, self.layer, self.parallel.rank)

    def only_part(self, plans: KernelPlans, kind: PartKind) -> StepPart | None:
        """The step's tokens, if all of them are of this kind."""
        parts = self._parts(plans)
        return parts[0] if len(parts) == 1 and parts[0].kind is kind else None

    def conv_constants(self, silu: bool = True) -> ConvConstants:
        """Of the layer's convolution."""
        return ConvConstants(self.conv_weight, self.conv_bias, silu)

    def convolve(
        self,
        x: Tensor,
        plans: KernelPlans,
        *,
        silu: bool = True,
        gates: Gates | None = None,
        channels: slice | None = None,
    ) -> Tensor:
        """[tokens, channels], rows may be strided -> the same, contiguous. `channels`: those of the
        layer's that x has, of a layer with several convolutions one behind another; None: all."""
        kernels, state, parts = plans.kernels, self.state(plans).conv, self._parts(plans)
        constants = self.conv_constants(silu)
        rings = plans.caches.rings.get(self.layer)
        ring = None if rings is None else rings.conv
        if channels is not None:
            constants, state = constants.of(channels), state[:, channels]
            ring = None if ring is None else ring[..., channels]
        if len(parts) == 1:
            only = parts[0]
            return _convolve(kernels, only.kind, x, constants, state, ring, only.conv, None, gates)
        out = x.new_empty(x.shape)
        for rows, kind, plan, _ in parts:
            own = None if gates is None else gates.of(rows)
            _convolve(kernels, kind, x[rows], constants, state, ring, plan, out[rows], own)
        return out

    def scan(
        self,
        tokens: AScansTokens,
        constants: Constants,
        plans: KernelPlans,
        head: int | None = None,
    ) -> Tensor:
        """[T, ...], like the tokens' `like`. `head`: of a layer with a scan for each, whose states
        are [slots, heads, ...] and whose inputs the rings have head by head."""
        kernel = self.kernel(plans.kernels.replays or plans.kernels)
        state, parts = self.state(plans).ssm, self._parts(plans)
        rings = plans.caches.rings.get(self.layer)
        ring = None if rings is None else rings.inputs
        if head is not None:
            state, each = state[:, head], len(tokens.kept)
            ring = None if ring is None else ring[head * each : (head + 1) * each]
        by_chance = plans.caches.rounding_seed is not None
        assert not (by_chance and any(part.kind is PartKind.DECODE for part in parts))
        if len(parts) == 1:
            return _run(kernel, parts[0].kind, tokens, constants, state, ring, parts[0].scan)
        out = tokens.like.new_empty(tokens.like.shape)
        for rows, kind, _, plan in parts:
            part = type(tokens)(*(values[rows] for values in tokens))
            _run(kernel, kind, part, constants, state, ring, plan, out[rows])
        return out

    def _parts(self, plans: KernelPlans) -> tuple[StepPart, ...]:
        return plans.recurrent[self.kind]

    def conv_parts(self, name: str, starts: list[int], total: int) -> Parts:
        """The convolution's weights, `name`d so in a checkpoint that has `total` channels, where
        this rank's sections begin at `starts`."""
        counts = zip(self.conv_sections, starts, strict=True)
        rows = [Rows(name, count, start, total) for count, start in counts]
        yield from sections("weight", rows, self.conv_weight[:, None])
        if self.conv_bias is not None:
            yield from sections("bias", rows, self.conv_bias)

    def after_loading(self) -> None:
        """What is made from the weights, again after new ones; what is in place stays there."""
        if self.conv_weight.is_cuda:  # channels side by side, as in the activations
            self.conv_weight.data = self.conv_weight.t().contiguous().t()


def _convolve(
    kernels: KernelSet,
    kind: PartKind,
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    ring: Tensor | None,
    plan: Plan,
    out: Tensor | None,
    gates: Gates | None,
) -> Tensor:
    """The convolution of a part of a step."""
    kernel = kernels.conv
    match kind:
        case PartKind.DECODE:
            return kernel.decode(x, constants, state, plan, out, gates)
        case PartKind.RUNS:
            assert ring is not None
            return kernel.decode_runs(x, constants, state, ring, plan, out, gates)
        case PartKind.PREFILL:
            return kernel.prefill(x, constants, state, plan, out, gates)
        case PartKind.REPLAY:
            assert ring is not None and kernels.replays is not None
            return kernels.replays.conv.run(x, constants, state, ring, plan, out, gates)


def _run(
    kernel: Any,
    kind: PartKind,
    tokens: Tokens,
    constants: Constants,
    state: Tensor,
    ring: Ring | None,
    plan: Plan,
    out: Tensor | None = None,
) -> Tensor:
    """The scan of a part of a step, by a Recurrence or a Replay."""
    match kind:
        case PartKind.DECODE:
            return kernel.decode(tokens, constants, state, plan, out)
        case PartKind.RUNS:
            assert ring is not None
            return kernel.decode_runs(tokens, constants, state, ring, plan, out)
        case PartKind.PREFILL:
            return kernel.prefill(tokens, constants, state, plan, out)
        case PartKind.REPLAY:
            return kernel.run(tokens, constants, state, ring, plan, out)
