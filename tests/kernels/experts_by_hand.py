"""Mixtures of experts pair by pair, in float64, and inputs for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import caps_of, limit_of
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.protocol import ExpertWeights, SharedExpert
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight, WeightFormat


class Mixture(NamedTuple):
    """What the arguments of kernels.experts' mix are made of."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    up_proj: Weight
    down_proj: Weight
    activation: str
    gated: bool

    def arguments(self, elsewhere: int = 0) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
        layer = ExpertWeights(self.up_proj, self.down_proj, self.activation, self.gated, elsewhere)
        return self.x, self.experts, self.weights, layer


def mixture(
    tokens: int,
    num_experts: int = 8,
    chosen: int = 2,
    width: int = 40,
    inner: int = 24,
    activation: str = "silu",
    gated: bool = True,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Mixture:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 2 else 1.0
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    logits = torch.randn(tokens, num_experts, generator=generator, device=device)
    best, experts = logits.topk(chosen, dim=-1)
    return Mixture(
        x=normal(tokens, width),
        experts=experts,
        weights=best.softmax(dim=-1),
        up_proj=normal(num_experts, inner * (2 if gated else 1), width),
        down_proj=normal(num_experts, width, inner),
        activation=activation,
        gated=gated,
    )


def shared_out(m: Mixture, ranks: int) -> list[Mixture]:
    """What each of so many ranks has: its experts alone, counted from its first one, and their
    number in place of all others."""
    local = m.up_proj.shape[0] // ranks
    parts = []
    for rank in range(ranks):
        mine = slice(rank * local, (rank + 1) * local)
        ids = m.experts - mine.start
        ids = torch.where((ids >= 0) & (ids < local), ids, local)
        parts.append(m._replace(experts=ids, up_proj=m.up_proj[mine], down_proj=m.down_proj[mine]))
    return parts


def quantized_mixture(m: Mixture, format: WeightFormat) -> tuple[Mixture, Mixture]:
    """With weights in a format, and with what these mean."""
    assert isinstance(m.up_proj, Tensor) and isinstance(m.down_proj, Tensor)
    up, down = (
        _quantized(weight.flatten(0, 1), format).stacked(len(weight))
        for weight in (m.up_proj, m.down_proj)
    )
    dtype = m.x.dtype
    plain = m._replace(up_proj=up.dequantize(dtype), down_proj=down.dequantize(dtype))
    return m._replace(up_proj=up, down_proj=down), plain


def _quantized(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    rounded = format.quantize(weight)
    if rounded.row_scale is None:
        return rounded
    # Triton's interpreter reads float8 from 256 on as infinite.
    halves = (rounded.scale.float() / 2).to(rounded.scale.dtype)
    return replace(rounded, scale=halves, row_scale=rounded.row_scale * 2)


def quantized_shared(
    shared: SharedExpert, format: WeightFormat
) -> tuple[SharedExpert, SharedExpert]:
    """As quantized_mixture."""
    assert isinstance(shared.up, Tensor) and isinstance(shared.down, Tensor)
    up, down = (_quantized(weight, format) for weight in (shared.up, shared.down))
    dtype = shared.up.dtype
    plain = shared._replace(up=up.dequantize(dtype), down=down.dequantize(dtype))
    return shared._replace(up=up, down=down), plain


def check_quantized(
    experts: Any,
    format: WeightFormat,
    tokens: int,
    activation: str,
    gated: bool,
    inner: int,
    width: int = 64,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """mix of quantised weights against what these mean; with inputs that are rounded, too, against
    the reference: codes that lie between two may be either."""
    m = mixture(
        tokens, chosen=3, width=width, inner=inner, activation=activation, gated=gated,
        device=device, dtype=dtype,
    )  # fmt: skip
    packed, plain = quantized_mixture(m, format)
    actual = experts.mix(*packed.arguments()).double()
    if format.activations == "none":
        expected = by_hand(plain)
    else:
        expected = reference.mix(*packed.arguments()).double()
        tolerance = max(tolerance, 2e-2)
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


def by_hand(m: Mixture) -> Tensor:
    """mix in float64: every token with every expert of its own."""
    y = torch.zeros(m.x.shape, dtype=torch.float64, device=m.x.device)
    for expert in range(m.up_proj.shape[0]):
        token, place = (m.experts == expert).nonzero(as_tuple=True)
        down = _mlp_by_hand(m, token, m.up_proj[expert], m.down_proj[expert])
        y.index_add_(0, token, down * m.weights[token, place, None].double())
    return y


def _mlp_by_hand(m: Mixture, token: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    up = m.x[token].double() @ up_proj.double().t()
    gate, up = up.chunk(2, dim=-1) if m.gated else (up, torch.ones_like(up))
    limit = limit_of(m.activation)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if (caps := caps_of(m.activation)) is not None:
        gate, up = (cap * torch.tanh(x / cap) * own for x, cap, own in (
            (gate, caps[0], 1 / (1 + torch.exp(-gate))), (up, caps[1], 1)
        ))  # fmt: skip
    elif m.activation.startswith("silu"):
        gate = gate / (1 + torch.exp(-gate))
    else:
        gate = gate.clamp(min=0) ** 2
    return (gate * up) @ down_proj.double().t()


def shared_mlp(
    width: int,
    inner: int,
    gated: bool,
    has_gate: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SharedExpert:
    generator = torch.Generator(device).manual_seed(inner)

    def normal(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * columns**-0.5).to(dtype)

    gate = normal(1, width) if has_gate else None
    return SharedExpert(normal(inner * (2 if gated else 1), width), normal(width, inner), gate)


def shared_by_hand(m: Mixture, shared: SharedExpert) -> Tensor:
    """What a shared MLP of the experts' kind adds, in float64."""
    every = torch.arange(len(m.x), device=m.x.device)
    assert isinstance(shared.up, Tensor) and isinstance(shared.down, Tensor)
    y = _mlp_by_hand(m, every, shared.up, shared.down)
    if shared.gate is not None:
        y = y * (m.x.double() @ shared.gate.double().t()).sigmoid()
    return y
