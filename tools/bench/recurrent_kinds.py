"""The kernels of each kind of recurrent layer at a model's sizes: inputs, floors, libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.timing import Call
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import (
    DeltaRuleConstants,
    DeltaRuleTokens,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
)
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.layers.lightning_attention import LightningAttentionConfig
from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.models.config import (
    KIMI_DELTA_ATTENTION,
    LIGHTNING_ATTENTION,
    MAMBA,
    SHARED_TRANSFORMER,
    SIDE_BY_SIDE,
    HybridModelConfig,
)

MAMBA2_BLOCKS = {MAMBA, SIDE_BY_SIDE, SHARED_TRANSFORMER}  # that have such a layer

Tensors = tuple[Tensor, ...]
# (inputs, state, slots) of an update, or (inputs, number of sequences) of a prefill -> calls
UpdateCalls = Callable[[Tensors, Tensor, DecodeSlots], dict[str, Call]]
PrefillCalls = Callable[[Tensors, int], dict[str, Call]]


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of recurrent layer, at one model's sizes."""

    letter: str  # in a pattern
    channels: int  # of the convolution; 0: there is none
    width: int
    silu: bool
    kernel_chunk: int
    # Of the scan; an empty state: there is none.
    state: tuple[int, ...] = (0,)
    kernel: Any = None
    inputs: Callable[[int], Any] = lambda tokens: ()  # ScanTokens, for so many tokens
    constants: Any = ()  # of a layer
    values_per_token: int = 0  # read and written, of the activations' type
    flops_per_token: float = 0.0  # multiplications and additions of prefill
    update_libraries: UpdateCalls = field(default=lambda *_: {})
    prefill_libraries: PrefillCalls = field(default=lambda *_: {})

    def layers(self, pattern: str) -> int:
        """How many a pattern has."""
        letters = MAMBA2_BLOCKS if self.letter == MAMBA else {self.letter}
        return sum(letter in letters for letter in pattern)


def recurrent_kinds(
    model: HybridModelConfig, kernels: KernelSet, device: torch.device, dtype: torch.dtype
) -> Iterator[RecurrentKind]:
    """Those that the model has."""

    def columns(tokens: int, *widths: int) -> Tensors:
        """Side by side, as a projection leaves them."""
        wide = torch.randn(tokens, sum(widths), device=device).to(dtype)
        return wide.split(list(widths), dim=1)

    def constant(*shape: int, value: float) -> Tensor:
        return torch.full(shape, value, device=device)

    letters = set(model.pattern)
    if letters & MAMBA2_BLOCKS and model.mamba is not None:
        yield _mamba2(model.mamba, kernels, columns, constant)
    if "S" in letters and model.mamba1 is not None:
        yield _mamba1(model.mamba1, kernels, columns, constant)
    if "G" in letters and model.gated_delta_net is not None:
        yield _gated_delta_net(model.gated_delta_net, kernels, columns, constant)
    delta = model.others.get(KIMI_DELTA_ATTENTION)
    if isinstance(delta, KimiDeltaAttentionConfig):
        yield _kimi_delta_attention(delta, kernels, columns, constant)
    lightning = model.others.get(LIGHTNING_ATTENTION)
    if isinstance(lightning, LightningAttentionConfig):
        heads, dim = lightning.num_heads, lightning.head_dim
        scan = Mamba2Config(heads, dim, dim, heads, 1, lightning.kernel_chunk)
        kind = _mamba2(scan, kernels, columns, constant)
        yield replace(kind, letter=LIGHTNING_ATTENTION, channels=0)
    if "C" in letters and model.short_conv is not None:
        yield RecurrentKind("C", model.hidden_size, model.short_conv.conv_width, False, 1)


Columns = Callable[..., Tensors]


def _mamba2(
    config: Mamba2Config, kernels: KernelSet, columns: Columns, constant: Callable[..., Tensor]
) -> RecurrentKind:
    heads, dim, size = config.num_heads, config.head_dim, config.state_size
    inner, groups, tile = config.inner_size, config.num_groups, 64
    channels = inner + 2 * groups * size
    decay = -torch.linspace(1, 16, heads, device=constant(1, value=0.0).device)
    skip, bias = constant(heads, value=1.0), constant(heads, value=-4.5)

    def inputs(tokens: int) -> Mamba2Tokens:
        x, b, c = columns(tokens, inner, groups * size, groups * size)
        _, _, dt = columns(tokens, inner, channels, heads)
        b, c = (values.unflatten(1, (groups, size)) for values in (b, c))
        return Mamba2Tokens(x.unflatten(1, (heads, dim)), b, c, dt)

    def update(tokens: Tensors, state: Tensor, slots: DecodeSlots) -> dict[str, Call]:
        x, b, c, dt = tokens
        wide = (
            dt[:, :, None].expand(-1, -1, dim),
            decay[:, None, None].expand(heads, dim, size),
            b,
            c,
        )
        calls: dict[str, Call] = {}
        if mamba_ssm := library("mamba_ssm.ops.triton.selective_state_update"):
            calls["mamba_ssm"] = lambda: mamba_ssm.selective_state_update(
                state, x, *wide, skip[:, None].expand(heads, dim),
                dt_bias=bias[:, None].expand(heads, dim), dt_softplus=True,
                state_batch_indices=slots.read_slot,
            )  # fmt: skip
        if flashinfer := library("flashinfer.mamba"):
            own_skip, own_bias = (values.to(x.dtype) for values in (skip, bias))
            calls["flashinfer"] = lambda: flashinfer.selective_state_update(
                state, x, *wide, own_skip[:, None].expand(heads, dim),
                dt_bias=own_bias[:, None].expand(heads, dim), dt_softplus=True,
                state_batch_indices=slots.read_slot,
            )  # fmt: skip
        return calls

    def prefill(tokens: Tensors, sequences: int) -> dict[str, Call]:
        mamba_ssm = library("mamba_ssm.ops.triton.ssd_combined")
        if mamba_ssm is None:
            return {}
        x, b, c, dt = (values.unflatten(0, (sequences, -1)) for values in tokens)
        return {
            "mamba_ssm": lambda: mamba_ssm.mamba_chunk_scan_combined(
                x, dt, decay, b, c, chunk_size=config.kernel_chunk, D=skip, dt_bias=bias,
                dt_softplus=True, return_final_states=True,
            )
        }  # fmt: skip

    return RecurrentKind(
        letter="M",
        channels=channels,
        width=config.conv_width,
        silu=True,
        kernel_chunk=config.kernel_chunk,
        state=(heads, dim, size),
        kernel=kernels.mamba2_scan,
        inputs=inputs,
        constants=Mamba2Constants(decay, skip, bias, config.dt_limit),
        values_per_token=2 * inner + 2 * groups * size + heads,
        # In tiles of 64 tokens: C h and B^T x, and half of the products inside a tile.
        flops_per_token=4 * inner * size + tile * (inner + groups * size),
        update_libraries=update,
        prefill_libraries=prefill,
    )


def _mamba1(
    config: Mamba1Config, kernels: KernelSet, columns: Columns, constant: Callable[..., Tensor]
) -> RecurrentKind:
    inner, size, rank = config.inner_size, config.state_size, config.dt_rank
    decay = constant(inner, size, value=-1.0).cumsum(1)
    skip, bias = constant(inner, value=1.0), constant(inner, value=-4.5)

    def inputs(tokens: int) -> Mamba1Tokens:
        _, z = columns(tokens, inner, inner)
        _, b, c = columns(tokens, rank, size, size)
        (x,), (dt,) = columns(tokens, inner), columns(tokens, inner)
        return Mamba1Tokens(x, z, dt, b, c)

    def update(tokens: Tensors, state: Tensor, slots: DecodeSlots) -> dict[str, Call]:
        mamba_ssm = library("mamba_ssm.ops.triton.selective_state_update")
        if mamba_ssm is None:
            return {}
        x, z, dt, b, c = tokens
        return {
            "mamba_ssm": lambda: mamba_ssm.selective_state_update(
                state, x, dt, decay, b, c, skip, z=z, dt_bias=bias, dt_softplus=True,
                state_batch_indices=slots.read_slot,
            )
        }  # fmt: skip

    def prefill(tokens: Tensors, sequences: int) -> dict[str, Call]:
        mamba_ssm = library("mamba_ssm.ops.selective_scan_interface")
        if mamba_ssm is None:
            return {}
        # [batch, channels, tokens], which it reads fastest when tokens are contiguous
        x, z, dt, b, c = (
            values.unflatten(0, (sequences, -1)).transpose(1, 2).contiguous() for values in tokens
        )
        return {
            "mamba_ssm": lambda: mamba_ssm.selective_scan_fn(
                x, dt, decay, b, c, skip, z, bias, delta_softplus=True, return_last_state=True
            )
        }

    return RecurrentKind(
        letter="S",
        channels=inner,
        width=config.conv_width,
        silu=True,
        kernel_chunk=config.kernel_chunk,
        state=(inner, size),
        kernel=kernels.mamba1_scan,
        inputs=inputs,
        constants=Mamba1Constants(decay, skip, bias),
        values_per_token=4 * inner + 2 * size,
        # No matrix products: exponentials bound it, 16 a clock and processor.
        flops_per_token=0.0,
        update_libraries=update,
        prefill_libraries=prefill,
    )


def _gated_delta_net(
    config: GatedDeltaNetConfig,
    kernels: KernelSet,
    columns: Columns,
    constant: Callable[..., Tensor],
) -> RecurrentKind:
    key_heads, heads = config.key_heads, config.value_heads
    key_dim, value_dim, chunk = config.key_dim, config.value_dim, config.kernel_chunk
    keys, values = key_heads * key_dim, heads * value_dim
    decay, bias = constant(heads, value=-4.0), constant(heads, value=-4.5)

    def inputs(tokens: int) -> DeltaRuleTokens:
        q, k, v = columns(tokens, keys, keys, values)
        *_, b, a = columns(tokens, 2 * keys + 2 * values, heads, heads)
        by_key = (key_heads, key_dim)
        v = v.unflatten(1, (heads, value_dim))
        return DeltaRuleTokens(q.unflatten(1, by_key), k.unflatten(1, by_key), v, a, b)

    def prefill(tokens: Tensors, sequences: int) -> dict[str, Call]:
        fla = library("fla.ops.gated_delta_rule")
        if fla is None:
            return {}
        q, k, v, a, b = (rows.unflatten(0, (sequences, -1)) for rows in tokens)
        q, k = (rows.repeat_interleave(heads // key_heads, 2) for rows in (q, k))

        def run() -> Any:
            g = decay * torch.nn.functional.softplus(a.float() + bias)
            return fla.chunk_gated_delta_rule(
                q, k, v, g, b.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
            )

        return {"fla": run}

    return RecurrentKind(
        letter="G",
        channels=2 * keys + values,
        width=config.conv_width,
        silu=True,
        kernel_chunk=chunk,
        state=(heads, value_dim, key_dim),
        kernel=kernels.gated_delta_rule,
        inputs=inputs,
        constants=DeltaRuleConstants(decay, bias, beta_scale=config.beta_scale),
        values_per_token=2 * keys + 2 * values + 2 * heads,
        # In chunks of Q tokens, a value head: w S^T, q S^T and v^T k with the state, and half of
        # k k^T, q k^T, T v, T k and P v inside the chunk.
        flops_per_token=heads * (6 * key_dim * value_dim + chunk * (3 * key_dim + 2 * value_dim)),
        prefill_libraries=prefill,
    )


def _kimi_delta_attention(
    config: KimiDeltaAttentionConfig,
    kernels: KernelSet,
    columns: Columns,
    constant: Callable[..., Tensor],
) -> RecurrentKind:
    heads, dim, chunk = config.num_heads, config.head_dim, config.kernel_chunk
    width = heads * dim
    constants = DeltaRuleConstants(
        constant(heads, value=-4.0),
        constant(heads, dim, value=-4.5),
        lower_bound=config.lower_bound,
    )

    def inputs(tokens: int) -> DeltaRuleTokens:
        by_head = (heads, dim)
        q, k, v = (rows.unflatten(1, by_head) for rows in columns(tokens, width, width, width))
        (a,) = columns(tokens, width)
        *_, b = columns(tokens, 3 * width, heads)
        return DeltaRuleTokens(q, k, v, a.unflatten(1, by_head), b)

    def prefill(tokens: Tensors, sequences: int) -> dict[str, Call]:
        fla = library("fla.ops.kda")
        if fla is None:
            return {}
        q, k, v, a, b = (rows.unflatten(0, (sequences, -1)) for rows in tokens)
        rate = (-constants.A).log()

        def run() -> Any:
            return fla.chunk_kda(
                q, k, v, a, b.sigmoid(), A_log=rate, dt_bias=constants.dt_bias.flatten(),
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                safe_gate=config.lower_bound is not None, lower_bound=config.lower_bound,
            )  # fmt: skip

        return {"fla": run}

    return RecurrentKind(
        letter=KIMI_DELTA_ATTENTION,
        channels=3 * width,
        width=config.conv_width,
        silu=True,
        kernel_chunk=chunk,
        state=(heads, dim, dim),
        kernel=kernels.gated_delta_rule,
        inputs=inputs,
        constants=constants,
        values_per_token=5 * width + heads,
        # As of a gated delta net, whose k k^T and q k^T each head has of its own here.
        flops_per_token=heads * (6 * dim * dim + chunk * (5 * dim)),
        prefill_libraries=prefill,
    )


def library(name: str) -> Any:
    """A module that may not be installed; None then."""
    if name.split(".")[0] in _MISSING:
        return None
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        _MISSING.add(name.split(".")[0])
        return None


_MISSING: set[str] = set()
