"""Learned scales and shifts of channels around the residual stream, as ZAYA has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.mixer import Deriving, parameter
from megatron_hybrid.layers.parts import Parts, whole


class ChannelScale(nn.Module):
    """(x + bias) * scale"""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = parameter((size,), dtype)
        self.bias = parameter((size,), dtype)

    def weight_parts(self) -> Parts:
        """Every rank holds them whole."""
        yield whole("scale", self.scale)
        yield whole("bias", self.bias)

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        """[..., size] -> the same; in the wider of the two types."""
        return (x + self.bias) * self.scale


class ResidualScaling(Deriving):
    """Of what a layer gives, y, and of the residual stream x, which becomes

        (y + hidden_states_bias) * hidden_states_scale + (x + residual_bias) * residual_scale

    As the sum is left to whoever follows, both shifts go to the stream, which is in float32.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in _NAMES:
            setattr(self, name, parameter((size,), dtype))
        self.hidden_states_scale: Tensor
        self.factor: Tensor  # [size] float32, of the stream
        self.shift: Tensor  # [size] float32, of both

    def weight_parts(self) -> Parts:
        """Every rank holds them whole."""
        for name in _NAMES:
            yield whole(name, getattr(self, name))

    def after_loading(self) -> None:
        """What is made from the weights."""
        scale, bias, factor, of_stream = (getattr(self, name).float() for name in _NAMES)
        self.derive("factor", factor)
        self.derive("shift", bias * scale + of_stream * factor)

    def mixed(self, total: Tensor) -> Tensor:
        """What is added of a layer's result, all ranks' parts summed: [tokens, size]."""
        return total * self.hidden_states_scale

    def stream(self, residual: Tensor) -> Tensor:
        """What it is added to: [tokens, size] float32."""
        return torch.addcmul(self.shift, residual, self.factor)


_NAMES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
