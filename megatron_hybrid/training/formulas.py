"""What kernels compute, as plain operations of torch that have gradients.

Nothing here has to have a kernel's bits: gradients are taken of these formulas at the kernels'
inputs, while values are the kernels'. All sequences are whole, from position 0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import ExpertWeights, Router
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.protocols import (
    DeltaRuleConstants,
    DeltaRuleTokens,
    HeadNorms,
    Mamba1Constants,
    Mamba1Tokens,
    Mamba2Constants,
    Mamba2Tokens,
)

# Tokens of Mamba2's chunks: the work in one grows with its square.
_CHUNK = 64
_EPS = 1e-6  # in the lengths of a delta net's q and k


@dataclass(frozen=True, slots=True)
class Sequences:
    """Packed tokens [T, ...] of S whole sequences."""

    lengths: tuple[int, ...]
    positions: Tensor  # [T]
    sequence: Tensor  # [T]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Sequences:
        """Sequences of so many tokens."""
        positions = torch.cat([torch.arange(length) for length in lengths])
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return cls(tuple(lengths), positions.to(device), sequence.to(device))

    def padded(self, values: Tensor, multiple: int = 1) -> Tensor:
        """[T, ...] -> [S, L, ...] with zeros behind what is shorter; L is a multiple of that."""
        length = -(-max(self.lengths) // multiple) * multiple
        rows = values.new_zeros((len(self.lengths) * length, *values.shape[1:]))
        rows = rows.index_copy(0, self.sequence * length + self.positions, values)
        return rows.unflatten(0, (len(self.lengths), length))

    def packed(self, values: Tensor) -> Tensor:
        """[S, L, ...] -> [T, ...]"""
        return values.flatten(0, 1).index_select(
            0, self.sequence * values.shape[1] + self.positions
        )


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """As in Activation."""
    if not gated:
        return ACTIVATIONS[activation](x)
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """As in Norm."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(dtype or weight.dtype)


def l2_clip(x: Tensor, scale: Tensor | None, most: float) -> Tensor:
    """As in Norm."""
    y = x.float() if scale is None else x.float() * scale.float()
    length = y.square().sum(-1, keepdim=True).sqrt()
    return (y * (most / (length + 1e-6)).clamp(max=1)).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    norm_first: bool,
    activation: str = "silu",
) -> Tensor:
    """As in Norm."""
    gates = ACTIVATIONS[activation](gate.float())
    values = x.float() if norm_first else x.float() * gates
    groups = values.unflatten(-1, (-1, group_size))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = (groups * scale).flatten(-2) * weight.float()
    return (normed * gates if norm_first else normed).to(weight.dtype)


def projected_heads(
    qkv: Tensor,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of Rope.prepare; angles: positions [T] and frequencies."""
    heads = qkv.shape[1] - 2 * kv_heads
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps, qkv.dtype)
        key = rms_norm(key, norms.key, norms.eps, qkv.dtype)
    if angles is not None:
        query, key = _rotated(query, *angles), _rotated(key, *angles)
    return query, key, value


def _rotated(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    angle = (positions[:, None].float() * frequencies)[:, None]
    half = angle.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cosine, sine = angle.cos(), angle.sin()
    turned = (first * cosine - second * sine, second * cosine + first * sine, rest.float())
    return torch.cat(turned, dim=-1).to(x.dtype)


def latents(
    query: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """LatentAttention.prepare's queries, and keys [T, 1, head_dim]; angles: as above."""
    size = len(norm.weight)
    normed = rms_norm(latent[:, None, :size], norm.weight, norm.eps, latent.dtype)
    behind = latent[:, None, size:]
    if angles is not None:
        nope = query.shape[-1] - behind.shape[-1]
        turned = _turned(query[..., nope:], interleaved, *angles)
        query = torch.cat((query[..., :nope], turned), dim=-1)
        behind = _turned(behind, interleaved, *angles)
    return query, torch.cat((normed, behind), dim=-1)


def _turned(x: Tensor, interleaved: bool, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Each number stays in its place."""
    if not interleaved:
        return _rotated(x, positions, frequencies)
    halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    first, second = _rotated(halves, positions, frequencies).chunk(2, dim=-1)
    return torch.stack((first, second), dim=-1).flatten(-2)


def latent_attention(
    query: Tensor, key: Tensor, weights: LatentWeights, scale: float, sequences: Sequences
) -> Tensor:
    """LatentAttention.attend to keys [T, 1, head_dim], by keys and values of every head."""
    latent, behind = key[:, 0].float().tensor_split([weights.key.shape[2]], dim=1)
    keys = torch.einsum("tl,hnl->thn", latent, weights.key.float())
    behind = behind[:, None].expand(-1, keys.shape[1], -1)
    value = torch.einsum("tl,hvl->thv", latent, weights.value.float())
    return attention(query, torch.cat((keys, behind), dim=-1), value, scale, sequences)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sequences: Sequences,
    window: int = 0,
    bias: RelativeBias | None = None,
) -> Tensor:
    """[T, heads, head_dim]: softmax attention to what is not behind a token. `window`: of
    AttentionShape."""
    q, k, v = (sequences.padded(x.float()).transpose(1, 2) for x in (query, key, value))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    seen = None
    if window or bias is not None:
        every = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        seen = every.tril() & every.triu(1 - (window or q.shape[2]))
    if bias is not None and seen is not None:
        profiles = sequences.padded(bias.weights.float()) @ F.pad(bias.bank.float(), (0, 1))
        at = torch.arange(q.shape[2], device=q.device)
        distance = (at[:, None] - at).clamp(0, bias.extent)
        place = distance.expand(*q.shape[:2], -1, -1)
        added = profiles.transpose(1, 2).gather(3, place)
        seen = added.masked_fill(~seen, -torch.inf)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale
    )
    return sequences.packed(out.transpose(1, 2)).to(query.dtype)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, sequences: Sequences
) -> Tensor:
    """x [T, channels], weight [channels, width]: as in causal_conv1d, without gates."""
    width, wide = weight.shape[1], x.float()
    y = torch.zeros_like(wide) if bias is None else bias.float().expand(wide.shape)
    for back in range(width):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(wide)]
        inside = (sequences.positions >= back)[:, None]
        y = y + torch.where(inside, earlier, 0) * weight[:, width - 1 - back].float()
    return (F.silu(y) if silu else y).to(x.dtype)


def mamba1(tokens: Mamba1Tokens, constants: Mamba1Constants, sequences: Sequences) -> Tensor:
    """[T, channels], token by token."""
    dt = F.softplus(tokens.dt.float() + constants.dt_bias)
    x, step, b, c = (
        sequences.padded(v.float()) for v in (tokens.x, dt, tokens.B, tokens.C)
    )  # [S, L, ...]
    state = x.new_zeros((x.shape[0], *constants.A.shape))  # [S, channels, state]
    outputs = []
    for t in range(x.shape[1]):
        added = (step[:, t] * x[:, t])[:, :, None] * b[:, t, None]
        state = state * torch.exp(step[:, t, :, None] * constants.A) + added
        outputs.append((state * c[:, t, None]).sum(-1))
    y = sequences.packed(torch.stack(outputs, dim=1)) + tokens.x.float() * constants.D
    return (y * F.silu(tokens.z.float())).to(tokens.x.dtype)


def mamba2(tokens: Mamba2Tokens, constants: Mamba2Constants, sequences: Sequences) -> Tensor:
    """[T, heads, head_dim], chunk by chunk: see mamba2_scan."""
    dt = F.softplus(tokens.dt.float() + constants.dt_bias).clamp(*constants.dt_limit)
    repeats = tokens.x.shape[1] // tokens.B.shape[1]
    x, step, b, c = (
        sequences.padded(values.float(), _CHUNK).unflatten(1, (-1, _CHUNK))
        for values in (tokens.x, dt, tokens.B, tokens.C)
    )  # [S, chunks, l, ...]
    b, c = (values.repeat_interleave(repeats, dim=3) for values in (b, c))
    decay = torch.cumsum((step * constants.A).double(), dim=2)  # [S, chunks, l, heads]
    dtx = x * step[..., None]
    between = decay[:, :, :, None] - decay[:, :, None]  # [S, chunks, l, s, heads]
    behind = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = between.masked_fill(behind[:, :, None], -torch.inf).exp().float()
    scores = torch.einsum("kclhn,kcshn->kclsh", c, b) * between
    y = torch.einsum("kclsh,kcshp->kclhp", scores, dtx)
    to_end = (decay[:, :, -1:] - decay).exp().float()
    added = torch.einsum("kclhp,kclhn->kchpn", dtx * to_end[..., None], b)
    state, carried = torch.zeros_like(added[:, 0]), []
    for chunk in range(x.shape[1]):
        carried.append(state)
        state = state * decay[:, chunk, -1].exp().float()[..., None, None] + added[:, chunk]
    before = torch.stack(carried, dim=1)  # [S, chunks, heads, head_dim, state]
    of_state = torch.einsum("kclhn,kchpn->kclhp", c, before) * decay.exp().float()[..., None]
    y = (y + of_state).flatten(1, 2)
    skipped = tokens.x.float() * constants.D[:, None]
    return (sequences.packed(y) + skipped).to(tokens.x.dtype)


def gated_delta_rule(
    tokens: DeltaRuleTokens, constants: DeltaRuleConstants, sequences: Sequences
) -> Tensor:
    """[T, v_heads, v_dim], token by token."""
    k_dim, repeats = tokens.k.shape[2], tokens.v.shape[1] // tokens.k.shape[1]
    rate, bias, a = constants.A[:, None], constants.dt_bias, tokens.a.float()
    if a.ndim == 2:  # one for all channels of the keys
        a, bias = a[..., None], bias[:, None]
    if constants.lower_bound is None:
        decay = (rate * F.softplus(a + bias)).exp()
    else:
        decay = (constants.lower_bound * torch.sigmoid(-rate * (a + bias))).exp()
    q, k = (
        _of_length_one(values.float()).repeat_interleave(repeats, dim=1)
        for values in (tokens.q, tokens.k)
    )
    beta = torch.sigmoid(tokens.b.float()) * constants.beta_scale
    q, k, v, decay, beta = (
        sequences.padded(values) for values in (q * k_dim**-0.5, k, tokens.v.float(), decay, beta)
    )  # [S, L, v_heads, ...]
    state = v.new_zeros((v.shape[0], *v.shape[2:], k_dim))
    outputs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None]
        known = torch.einsum("shvk,shk->shv", state, k[:, t])
        d = (v[:, t] - known) * beta[:, t, :, None]
        state = state + d[..., None] * k[:, t, :, None]
        outputs.append(torch.einsum("shvk,shk->shv", state, q[:, t]))
    return sequences.packed(torch.stack(outputs, dim=1)).to(tokens.v.dtype)


def _of_length_one(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _EPS)


def expert_weights(x: Tensor, weight: Tensor, experts: Tensor, router: Router) -> Tensor:
    """The weights [T, chosen + sinks] of experts that are chosen already, as Router says, but for
    its scale."""
    logits = F.linear(x.float(), weight.float())
    if router.sinks:
        kept = torch.cat((logits.gather(1, experts), logits[:, -router.sinks :]), dim=1)
        return torch.softmax(F.logsigmoid(kept), dim=-1) * router.factor
    if router.scoring == "softmax":
        if router.normalize:
            shares = torch.softmax(logits.gather(1, experts), dim=-1)
        else:
            shares = torch.softmax(logits, dim=-1).gather(1, experts)
    else:
        shares = torch.sigmoid(logits).gather(1, experts)
        if router.normalize:
            shares = shares / (shares.sum(-1, keepdim=True) + router.eps)
    return shares * router.factor


def mixture(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """[T, width]: Experts.mix, without a shared MLP."""
    up: Any = layer.up
    down: Any = layer.down
    y = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, place = (experts == expert).nonzero(as_tuple=True)
        if len(token):
            one = mlp(x.index_select(0, token), up[expert], down[expert], layer)
            y = y.index_add(0, token, one * weights[token, place, None].to(x.dtype))
    return y


def mlp(x: Tensor, up: Tensor, down: Tensor, layer: ExpertWeights) -> Tensor:
    """An MLP of the experts' kind."""
    return F.linear(activate(F.linear(x, up), layer.activation, layer.gated), down)
