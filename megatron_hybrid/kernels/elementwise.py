"""Functions of single numbers in plain torch, the same bits wherever a number stands.

Of sigmoid, silu, gelu and softplus torch computes the last numbers of a tensor, those that fill no
vector of the processor, by other code than the ones before: what they give would depend on who
else is in the step. exp, log1p, erf and tanh, and sums, products and quotients, do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), of 16-bit numbers rounded once."""
    return torch.exp(-_wide(x)).add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), of 16-bit numbers rounded once."""
    wide = _wide(x)
    return (wide / torch.exp(-wide).add_(1)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x (1 + erf(x / sqrt 2)) / 2, of 16-bit numbers rounded once."""
    wide = _wide(x)
    return torch.erf(wide * 0.5**0.5).add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, of 16-bit numbers rounded once."""
    wide = _wide(x)
    inner = (wide + 0.044715 * wide * wide * wide).mul_(-2 * (2 / torch.pi) ** 0.5)
    return (wide / torch.exp(inner).add_(1)).to(x.dtype)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), of 16-bit numbers rounded once."""
    return (_wide(x) / cap).tanh_().mul_(cap).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)"""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x
