"""Nodes of autograd: forward, a kernel as it is, on the same arguments, which gives the same bits;
backward, a formula at the inputs that were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of a kernel's call, or of its formula: tensors, or None where there is none.
Call = Callable[..., Any]


class _Recomputed(torch.autograd.Function):
    """forward: kernel(*inputs); backward: of formula(*inputs)."""

    @staticmethod
    def forward(ctx: Any, kernel: Call, formula: Call, *inputs: Tensor | None) -> Any:
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.formula(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
        wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,  # type: ignore[arg-type]  # None needs no gradient
                [g for _, g in pairs],
                allow_unused=True,
            )
        )
        return None, None, *(next(found) if needs else None for needs in needed)


def recomputed(kernel: Call, formula: Call, *inputs: Tensor | None) -> Any:
    """What `kernel` gives of the inputs, with the gradients of `formula` at them."""
    return _Recomputed.apply(kernel, formula, *inputs)


class _Product(torch.autograd.Function):
    """A product's gradients need no formula computed again."""

    @staticmethod
    def forward(ctx: Any, kernel: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        return kernel(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            None,
            grad @ weight if of_x else None,
            grad.t() @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def product(kernel: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias by `kernel`, with its gradients."""
    y: Tensor = _Product.apply(kernel, x, weight, bias)
    return y


@dataclass(frozen=True)
class Over:
    """Kernels whose other calls stay as they are."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
