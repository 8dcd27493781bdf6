"""What each kind of kernel is called with: a Protocol a kind, which all implementations of it fit.

A plan is what the same implementation's `plan` made of the step, once for all layers; nobody else
looks into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import MLSTMTokens, RGLRUTokens, WKVTokens
from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    KVCache,
    PackedStates,
    PrefillSegments,
)
from megatron_hybrid.kernels.linear.formats import Weight, WeightFormat

Plan = Any
Rings = tuple[Tensor, ...]  # [rows, R, ...] each: what `kept` was of earlier tokens


class ConvConstants(NamedTuple):
    """Of one layer's convolution."""

    weight: Tensor  # [channels, width]
    bias: Tensor | None  # [channels]
    silu: bool = True  # of the outputs

    def of(self, channels: slice) -> ConvConstants:
        """Those of some channels."""
        bias = None if self.bias is None else self.bias[channels]
        return ConvConstants(self.weight[channels], bias, self.silu)


class Gates(NamedTuple):
    """What a convolution's tokens are multiplied by, [T, channels] each (rows may be strided).
    Products are rounded to the tokens' dtype, as are outputs before they are multiplied."""

    before: Tensor | None = None  # the inputs; windows and rings keep the products
    after: Tensor | None = None  # the outputs

    def of(self, rows: slice) -> Gates:
        """Those of some tokens."""
        before, after = (None if gate is None else gate[rows] for gate in self)
        return Gates(before, after)


class Mamba1Tokens(NamedTuple):
    """A row a token; rows may be strided."""

    x: Tensor  # [T, channels]
    z: Tensor  # [T, channels], the gate
    dt: Tensor  # [T, channels], before bias and softplus
    B: Tensor  # [T, state]
    C: Tensor  # [T, state]

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.x

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.x, self.dt, self.B


class Mamba1Constants(NamedTuple):
    """Of one layer, float32."""

    A: Tensor  # [channels, state], negative
    D: Tensor  # [channels]
    dt_bias: Tensor  # [channels]
    rounding_seed: int | None = None  # see RoundsStates


class Mamba2Tokens(NamedTuple):
    """A row a token; rows may be strided. Head h has group h // (heads / groups)."""

    x: Tensor  # [T, heads, head_dim]
    B: Tensor  # [T, groups, state]
    C: Tensor  # [T, groups, state]
    dt: Tensor  # [T, heads], before bias and softplus

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.x

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.x, self.B, self.dt


class Mamba2Constants(NamedTuple):
    """Of one layer, float32."""

    A: Tensor  # [heads], negative
    D: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    dt_limit: tuple[float, float]  # that step sizes are clamped to
    rounding_seed: int | None = None  # see RoundsStates


class DeltaRuleTokens(NamedTuple):
    """A row a token; rows may be strided. Value head h has key head h // (v_heads / k_heads)."""

    q: Tensor  # [T, k_heads, k_dim], of any length
    k: Tensor  # [T, k_heads, k_dim], of any length
    v: Tensor  # [T, v_heads, v_dim]
    a: Tensor  # [T, v_heads], the decay before bias and softplus; of KDA [T, v_heads, k_dim]
    b: Tensor  # [T, v_heads], beta before the sigmoid

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.v

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.k, self.v, self.a, self.b


class DeltaRuleConstants(NamedTuple):
    """Of one layer, float32."""

    A: Tensor  # [v_heads], negative
    dt_bias: Tensor  # [v_heads]; of KDA [v_heads, k_dim]
    rounding_seed: int | None = None  # see RoundsStates
    beta_scale: float = 1.0  # of beta behind the sigmoid: with 2, a step may turn a key's sign
    lower_bound: float | None = None  # of the log of a token's decay: see the reference


class RoundsStates(Protocol):
    """Constants of any scan."""

    @property
    def rounding_seed(self) -> int | None:
        """Of stochastic rounding (state_rounding/reference.py) of the states that a call stores,
        which are float16, an odd number; None: they are rounded to the nearest. Not for `decode`,
        which does not know how many tokens are in a state: one-token DecodeRuns do."""


# The tokens of any scan, and a function's that gives or takes those of one.
ScanTokens = Mamba1Tokens | Mamba2Tokens | DeltaRuleTokens | RGLRUTokens | WKVTokens | MLSTMTokens
AScansTokens = TypeVar(
    "AScansTokens", Mamba1Tokens, Mamba2Tokens, DeltaRuleTokens, RGLRUTokens, WKVTokens, MLSTMTokens
)

Tokens = TypeVar("Tokens", contravariant=True)
Constants = TypeVar("Constants", contravariant=True)
Ring = TypeVar("Ring", contravariant=True)


class Recurrence(Protocol[Tokens, Constants, Ring]):
    """A kernel with a state in each slot, [slots, ...], which all calls read and write. They give
    the outputs [T, ...], like the tokens' `like`: in `out` if that is given."""

    def plan(self, segments: PrefillSegments, size: int, /) -> Plan:
        """Of the prompts; size: the kernel chunk, or a convolution's width."""

    def prefill(
        self,
        tokens: Tokens,
        constants: Constants,
        state: Tensor,
        plan: Plan,
        out: Tensor | None = None,
    ) -> Tensor:
        """PrefillSegments."""

    def decode(
        self,
        tokens: Tokens,
        constants: Constants,
        state: Tensor,
        plan: Plan,
        out: Tensor | None = None,
    ) -> Tensor:
        """DecodeSlots: T = N sequences, one token each."""

    def decode_runs(
        self,
        tokens: Tokens,
        constants: Constants,
        state: Tensor,
        ring: Ring,
        plan: Plan,
        out: Tensor | None = None,
    ) -> Tensor:
        """DecodeRuns; ring: read and written."""


class Convolution(Recurrence[Tensor, ConvConstants, Tensor], Protocol):
    """Of tokens [T, channels], whose rows may be strided; the state [slots, channels, width - 1] is
    the last inputs, a ring [rows, R, channels] the same of earlier tokens."""

    def prefill(
        self,
        tokens: Tensor,
        constants: ConvConstants,
        state: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Recurrence; with gates, too, padding gives zeros."""

    def decode(
        self,
        tokens: Tensor,
        constants: ConvConstants,
        state: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Recurrence."""

    def decode_runs(
        self,
        tokens: Tensor,
        constants: ConvConstants,
        state: Tensor,
        ring: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Recurrence."""

    def plan_runs(self, runs: DecodeRuns, width: int, ring_length: int) -> Plan:
        """Of a step's decode_runs."""


class Packing(Protocol):
    """States and windows from full slots to packed ones, and back, by slot number: [moves] each, of
    any integer type; no destination is named twice."""

    def pack(self, states: PackedStates, source: Tensor, destination: Tensor) -> None:
        """Into packed slots: rounded to the nearest."""

    def unpack(self, states: PackedStates, source: Tensor, destination: Tensor) -> None:
        """Into full slots."""


class Norm(Protocol):
    """RMS norms (Zhang and Sennrich, 2019) with statistics in float32. `into`: who reads the
    result, which is left rounded for them then."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """x / rms(x) * weight over the last dimension: [..., size], rows contiguous -> the same in
        `dtype`, by default the weight's, in which it is computed. weight [size], or one for each
        head [heads, size] of x [tokens, heads, size]."""

    def rms_norm_parts(
        self, x: Tensor, sections: tuple[int, int, int], weight: Tensor, eps: float
    ) -> Tensor:
        """rms_norm of three parts of each row, each by itself: x [tokens, sum of sections] (rows
        may be strided), weight [sum of sections] -> the same as x, contiguous, in weight's dtype.
        """

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        multiplier: float,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        into: Reader | None = None,
    ) -> tuple[Inputs, Tensor]:
        """The norm of residual + multiplier * x, and that sum, which may take `residual`'s place:
        x [tokens, size], residual [tokens, size] (float32, or x's dtype; rows may be strided) ->
        norm in `dtype` (by default the weight's), sum in residual's."""

    @property
    def add_rms_norm_over_ranks(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """add_rms_norm of the sum over ranks, where a kernel can do both; see norm/triton.py."""

    def l2_clip(self, x: Tensor, scale: Tensor | None, most: float) -> Tensor:
        """y = x * scale with vectors, over the last dimension, of a length of `most` at most:
        longer ones are y * most / (|y| + 1e-6). x [tokens, heads, size] (tokens and heads may be
        strided), scale [heads, size] (None: 1) -> the same as x, contiguous."""

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        group_size: int,
        eps: float,
        norm_first: bool = False,
        into: Reader | None = None,
        activation: str = "silu",
    ) -> Inputs:
        """weight * norm(x * act(gate)), or, where `norm_first`, weight * norm(x) * act(gate); each
        group of channels is normalised by itself. `activation`: "silu" or "sigmoid".

        x, gate [tokens, channels] (rows may be strided) -> the same in weight's dtype.
        """


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys; weights as of Norm.rms_norm."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


class Rope(Protocol):
    """Rotary position embedding (Su et al., "RoFormer", 2021) of a head's first dimensions."""

    def plan(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Plan:
        """positions [tokens], frequencies [rotary_dim / 2] float32; once a step."""

    def prepare(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        plan: Plan,
        cache: KVCache,
        attention: Plan,
    ) -> Tensor:
        """Queries, keys and values as they were projected, for Attention.attend: heads of queries
        and keys are normed, then rotated unless `plan` is None; keys and values go into the cache
        (as in Attention.append, with its plan `attention`).

        qkv [tokens, heads + 2 * kv_heads, head_dim], tokens may be strided -> queries
        [tokens, heads, head_dim]; of no heads keys and values are stored all the same.
        """

    def turn(
        self, qkv: Tensor, norms: HeadNorms | None, plan: Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for a layer that has no KV cache: qkv [tokens, 3 * heads, head_dim], tokens may
        be strided -> queries, keys and values [tokens, heads, head_dim], tokens may be strided."""


class Activation(Protocol):
    """`activation` is a key of activation.reference.ACTIVATIONS, or what its limit_of or caps_of
    know; `into`: see Norm."""

    def activate(
        self, x: Tensor, activation: str, gated: bool, into: Reader | None = None
    ) -> Inputs:
        """act(x), or, where `gated`, act(first half of the columns) * second half.

        x [tokens, columns] (rows may be strided) -> [tokens, columns or columns / 2] in x's dtype.
        """

    def gate(self, x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Inputs:
        """act(gate) * x, both [tokens, columns] (rows may be strided) -> the same in x's dtype."""


class QuantizedRows(NamedTuple):
    """Inputs of linear layers with 8-bit products: x[t, k] = values[t, k] * scale[t, k // group]"""

    values: Tensor  # [T, K] float8_e4m3fn or int8
    scale: Tensor  # [T, 1] or [T, K / group] (rounded up) float32
    dtype: torch.dtype  # of the products
    plain: Tensor | None = None  # [T, K] before rounding, where a layer reads it

    @property
    def shape(self) -> torch.Size:
        """[T, K]"""
        return self.values.shape


Inputs = Tensor | QuantizedRows


class Reader(NamedTuple):
    """How the linear layers that read a result take it."""

    format: WeightFormat
    input_scale: Tensor | None  # [] float32, where the format has a constant one
    plain: bool = False  # somebody also reads it as it is


class Linear(Protocol):
    """Products with weights as they are, or quantised ones; see linear/formats.py."""

    def quantize_rows(
        self, x: Tensor, format: WeightFormat, input_scale: Tensor | None
    ) -> QuantizedRows:
        """x [T, K] (rows may be strided), as a layer with weights in this format takes it."""

    def multiply(self, x: Inputs, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias: x [T, K], W [N, K] -> [T, N] in x's dtype. x is quantised as the format
        says, unless it is already."""

    def multiply_activated(
        self, x: Inputs, weight: Weight, bias: Tensor | None, activation: str, gated: bool
    ) -> Tensor | None:
        """What Activation.activate makes of that product, with the same roundings, in one kernel;
        None where there is none for such inputs."""

    def weights_changed(self) -> None:
        """To be called when weights were overwritten where they are."""
