"""A kernel set under autograd: values are its kernels', gradients those of formulas.py.

Kernels write caches in place and overwrite what they have read, which autograd cannot follow: each
call is a node of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    AttentionShape,
    KVCache,
    PagedSequences,
)
from megatron_hybrid.kernels.convolved_heads import reference as convolved_heads
from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.protocols import ConvConstants, Gates, HeadNorms, Plan, Reader
from megatron_hybrid.training import formulas
from megatron_hybrid.training.experts import ExpertsUnderAutograd
from megatron_hybrid.training.formulas import Sequences
from megatron_hybrid.training.latent_attention import (
    LatentAttentionUnderAutograd,
    PassPlan,
    stored_rows,
)
from megatron_hybrid.training.nodes import Call, Over, product, recomputed


def under_autograd(kernels: KernelSet, sequences: Sequences) -> KernelSet:
    """`kernels` for one pass over whole sequences of a model on one rank, without quantised
    weights."""
    scans: dict[str, Call] = {
        "mamba1_scan": formulas.mamba1,
        "mamba2_scan": formulas.mamba2,
        "gated_delta_rule": formulas.gated_delta_rule,
    }

    def scan(inner: Any, name: str) -> Any:
        return _Scan(inner, partial(scans[name], sequences=sequences))

    attention: Any = _Attention(kernels.attention, sequences)
    replays = kernels.replays
    if replays is not None:
        conv: Any = _Convolution(replays.conv, sequences)
        replays = replays._replace(
            conv=conv, **{name: scan(getattr(replays, name), name) for name in scans}
        )
    conv = _Convolution(kernels.conv, sequences)
    changed: dict[str, Any] = {name: scan(getattr(kernels, name), name) for name in scans}
    changed |= {
        "attention": attention,
        "latent_attention": LatentAttentionUnderAutograd(kernels.latent_attention, sequences),
        "rope": _Rope(kernels.rope, attention),
        "conv": conv,
        "convolved_heads": _ConvolvedHeads(kernels.convolved_heads),
        "norm": _Norm(kernels.norm),
        "activation": _Activation(kernels.activation),
        "linear": _Linear(kernels.linear),
        "experts": ExpertsUnderAutograd(kernels.experts),
        "replays": replays,
        "projected_mamba1": None,
    }
    return replace(kernels, **changed)


@dataclass(frozen=True)
class _Linear(Over):
    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As in Linear."""
        return product(self.inner.multiply, x, weight, bias)

    def multiply_activated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool
    ) -> Tensor | None:
        """As in Linear."""
        with torch.no_grad():
            y = self.inner.multiply_activated(x, weight, bias, activation, gated)
        if y is None:
            return None

        def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return formulas.activate(F.linear(x, weight, bias), activation, gated)

        found: Tensor = recomputed(lambda *_: y, formula, x, weight, bias)
        return found


@dataclass(frozen=True)
class _Norm(Over):
    add_rms_norm_over_ranks: None = None

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As in Norm."""
        options: dict[str, Any] = {"eps": eps, "dtype": dtype}
        formula = partial(formulas.rms_norm, **options)
        y: Tensor = recomputed(partial(self.inner.rms_norm, **options), formula, x, weight)
        return y

    def l2_clip(self, x: Tensor, scale: Tensor | None, most: float) -> Tensor:
        """As in Norm."""
        kernel, formula = (partial(f, most=most) for f in (self.inner.l2_clip, formulas.l2_clip))
        y: Tensor = recomputed(kernel, formula, x, scale)
        return y

    def rms_norm_parts(
        self, x: Tensor, sections: tuple[int, int, int], weight: Tensor, eps: float
    ) -> Tensor:
        """As in Norm."""

        def kernel(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = self.inner.rms_norm_parts(x, sections, weight, eps)
            return y

        def formula(x: Tensor, weight: Tensor) -> Tensor:
            parts = zip(x.split(sections, dim=1), weight.split(sections), strict=True)
            return torch.cat([formulas.rms_norm(part, own, eps) for part, own in parts], dim=1)

        y: Tensor = recomputed(kernel, formula, x, weight)
        return y

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        multiplier: float,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        into: Reader | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As in Norm."""
        assert into is None

        def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            # A copy: the sum may take its place.
            return self.inner.add_rms_norm(x, residual.clone(), multiplier, weight, eps, dtype)

        def formula(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            total = (residual.float() + multiplier * x.float()).to(residual.dtype)
            return formulas.rms_norm(total, weight, eps, dtype), total

        normed, total = recomputed(kernel, formula, x, residual, weight)
        return normed, total

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
    ) -> Tensor:
        """As in Norm."""
        assert into is None
        options: dict[str, Any] = {
            "group_size": group_size, "eps": eps, "norm_first": norm_first,
            "activation": activation,
        }  # fmt: skip
        kernel = partial(self.inner.gated_rms_norm, **options)
        formula = partial(formulas.gated_rms_norm, **options)
        y: Tensor = recomputed(kernel, formula, x, gate, weight)
        return y


@dataclass(frozen=True)
class _Activation(Over):
    def activate(
        self, x: Tensor, activation: str, gated: bool, into: Reader | None = None
    ) -> Tensor:
        """As in Activation."""
        assert into is None
        options: dict[str, Any] = {"activation": activation, "gated": gated}
        formula = partial(formulas.activate, **options)
        y: Tensor = recomputed(partial(self.inner.activate, **options), formula, x)
        return y

    def gate(self, x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Tensor:
        """As in Activation."""
        assert into is None

        def formula(x: Tensor, gate: Tensor) -> Tensor:
            return formulas.ACTIVATIONS[activation](gate) * x

        kernel = partial(self.inner.gate, activation=activation)
        y: Tensor = recomputed(kernel, formula, x, gate)
        return y


@dataclass(frozen=True)
class _Attention(Over):
    """Gradients go from queries to the keys and values that `_Rope` put into the cache."""

    sequences: Sequences
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by the cache's keys

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> PassPlan:
        """As in Attention."""
        assert not shape.first_position
        where = shape.scale, paged.kv_slot, shape.window
        return PassPlan(self.inner.plan(paged, shape), *where)

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: PassPlan,
        bias: RelativeBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As in Attention; without sinks, which no model has that can be trained."""
        assert sinks is None
        key, value = self.kept.pop(id(cache.key))

        def kernel(query: Tensor, key: Tensor, value: Tensor, *of_bias: Tensor) -> Any:
            own = RelativeBias(*of_bias) if of_bias else None
            return self.inner.attend(query, cache, plan.inner, own)

        def formula(query: Tensor, key: Tensor, value: Tensor, *of_bias: Tensor) -> Tensor:
            own = RelativeBias(*of_bias) if of_bias else None
            return formulas.attention(
                query, key, value, plan.scale, self.sequences, plan.window, own
            )

        y: Tensor = recomputed(kernel, formula, query, key, value, *(bias or ()))
        return y


@dataclass(frozen=True)
class _Rope(Over):
    attention: _Attention

    def plan(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Any:
        """As in Rope."""
        return self.inner.plan(positions, frequencies, dtype), (positions, frequencies)

    def prepare(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        plan: Any,
        cache: KVCache,
        attention: PassPlan,
    ) -> Tensor:
        """As in Rope."""
        rotation, angles = (None, None) if plan is None else plan
        kv_heads = cache.key.shape[2]

        def with_norms(query: Tensor | None, key: Tensor | None) -> HeadNorms | None:
            return norms and HeadNorms(query, key, norms.eps)  # type: ignore[arg-type]

        def kernel(qkv: Tensor, *weights: Tensor | None) -> Any:
            heads = with_norms(*weights)
            query = self.inner.prepare(qkv, heads, rotation, cache, attention.inner)
            # What attention will see of them; rounded to FP8, their gradients pass as they are.
            stored = (
                stored_rows(cache.key, attention.kv_slot, cache.k_scale, qkv.dtype),
                stored_rows(cache.value, attention.kv_slot, cache.v_scale, qkv.dtype),
            )
            return query.clone(), *stored

        def formula(qkv: Tensor, *weights: Tensor | None) -> Any:
            return formulas.projected_heads(qkv, with_norms(*weights), angles, kv_heads)

        weights = (None, None) if norms is None else (norms.query, norms.key)
        query, key, value = recomputed(kernel, formula, qkv, *weights)
        self.attention.kept[id(cache.key)] = key, value
        found: Tensor = query
        return found

    def turn(
        self, qkv: Tensor, norms: HeadNorms | None, plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in Rope."""
        rotation, angles = (None, None) if plan is None else plan
        heads = qkv.shape[1] // 3

        def with_norms(query: Tensor | None, key: Tensor | None) -> HeadNorms | None:
            return norms and HeadNorms(query, key, norms.eps)  # type: ignore[arg-type]

        def kernel(qkv: Tensor, *weights: Tensor | None) -> Any:
            turned = self.inner.turn(qkv, with_norms(*weights), rotation)
            return tuple(one.clone() for one in turned)

        def formula(qkv: Tensor, *weights: Tensor | None) -> Any:
            return formulas.projected_heads(qkv, with_norms(*weights), angles, heads)

        weights = (None, None) if norms is None else (norms.query, norms.key)
        query, key, value = recomputed(kernel, formula, qkv, *weights)
        return query, key, value


@dataclass(frozen=True)
class _ConvolvedHeads(Over):
    def mix(self, tokens: HeadTokens, weight: Tensor, bias: Tensor, kv_heads: int) -> Tensor:
        """As in ConvolvedHeads."""

        def call(mix: Call, *inputs: Tensor) -> Any:
            projected, value, weight, bias, *taps = inputs
            return mix(HeadTokens(projected, tuple(taps), value), weight, bias, kv_heads)

        calls = partial(call, self.inner.mix), partial(call, convolved_heads.mix)
        y: Tensor = recomputed(*calls, tokens.projected, tokens.value, weight, bias, *tokens.taps)
        return y


@dataclass(frozen=True)
class _Convolution(Over):
    sequences: Sequences

    def prefill(
        self,
        x: Tensor,
        constants: ConvConstants,
        state: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Convolution."""
        return self._call(self.inner.prefill, (state, plan), x, constants, gates)

    def run(
        self,
        x: Tensor,
        constants: ConvConstants,
        state: Tensor,
        ring: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in ConvReplay."""
        return self._call(self.inner.run, (state, ring, plan), x, constants, gates)

    def _call(
        self,
        call: Call,
        where: tuple[Any, ...],
        x: Tensor,
        constants: ConvConstants,
        gates: Gates | None,
    ) -> Tensor:
        silu = constants.silu

        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *around: Tensor | None) -> Any:
            own = None if gates is None else Gates(*around)
            return call(x, ConvConstants(weight, bias, silu), *where, None, own)

        def formula(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            before: Tensor | None,
            after: Tensor | None,
        ) -> Tensor:
            x = x if before is None else x * before
            y = formulas.convolution(x, weight, bias, silu, self.sequences)
            return y if after is None else y * after

        around = gates or Gates()
        y: Tensor = recomputed(kernel, formula, x, constants.weight, constants.bias, *around)
        return y


@dataclass(frozen=True)
class _Scan(Over):
    """A Recurrence, or a Replay."""

    formula: Call  # (tokens, constants) -> outputs

    def prefill(
        self, tokens: Any, constants: Any, state: Tensor, plan: Plan, out: Tensor | None = None
    ) -> Tensor:
        """As in Recurrence."""
        return self._call(self.inner.prefill, (state, plan), tokens, constants)

    def run(
        self,
        tokens: Any,
        constants: Any,
        state: Tensor,
        ring: Any,
        plan: Plan,
        out: Tensor | None = None,
    ) -> Tensor:
        """As in Replay."""
        return self._call(self.inner.run, (state, ring, plan), tokens, constants)

    def _call(self, call: Call, where: tuple[Any, ...], tokens: Any, constants: Any) -> Tensor:
        learnt = {k: v for k, v in constants._asdict().items() if isinstance(v, Tensor)}
        count = len(tokens)

        def given(inputs: tuple[Tensor, ...]) -> tuple[Any, Any]:
            own = dict(zip(learnt, inputs[count:], strict=True))
            return type(tokens)(*inputs[:count]), constants._replace(**own)

        def kernel(*inputs: Tensor) -> Any:
            return call(*given(inputs), *where)

        def formula(*inputs: Tensor) -> Any:
            return self.formula(*given(inputs))

        y: Tensor = recomputed(kernel, formula, *tokens, *learnt.values())
        return y
