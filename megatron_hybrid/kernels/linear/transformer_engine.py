"""Linear layers through Transformer Engine, in the weights' type or in FP8 by one of its recipes.

Weights stay as they were loaded; in FP8 a second, rounded copy of each is kept, which is made once
and again whenever weights are overwritten. Inputs are rounded in every product. Recipes:

tensorwise  a scale for a whole weight, and for all rows of a product's inputs
delayed     the same, but inputs have the scale that suits the largest of earlier products
blockwise   a scale for 128x128 weights, and for 128 columns of a row of inputs
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

from megatron_hybrid.kernels.linear import reference, triton
from megatron_hybrid.kernels.linear.formats import FP8_MAX, QuantizedWeight, Weight
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs

# Of which FP8 products take inputs and weights in multiples.
ROWS, MULTIPLE = 8, 16


class TransformerEngineLinear:
    """Kernels of the kind Linear. `recipe`: see above, or None: products in the weights' type.
    `weights` [N, K] are those whose products are Transformer Engine's; others' are torch's, and so
    are those in FP8 of sizes that it does not take."""

    quantize_rows = staticmethod(triton.quantize_rows)
    multiply_activated = staticmethod(reference.multiply_activated)

    def __init__(self, recipe: str | None, weights: Iterable[Tensor]) -> None:
        self._layers: dict[int, _Layer] = {}
        for weight in weights:
            if recipe is None or not any(size % MULTIPLE for size in weight.shape):
                self._layers[weight.data_ptr()] = _Layer(weight, recipe)

    def weights_changed(self) -> None:
        """Round the weights again, where the copies are: CUDA graphs go on reading them there."""
        for layer in self._layers.values():
            layer.round_weight()

    def multiply(self, x: Inputs, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """As in Linear."""
        if isinstance(weight, QuantizedWeight):
            return triton.multiply(x, weight, bias)
        rows, layer = plain_rows(x), self._layers.get(weight.data_ptr())
        if layer is None or not len(rows):
            return F.linear(rows, weight, bias)
        return layer.multiply(rows, bias)


class _Layer:
    """One weight, what is kept of it, and how its inputs are rounded."""

    def __init__(self, weight: Tensor, recipe: str | None) -> None:
        self.weight, self.recipe = weight, recipe
        self.stored: Any = weight
        if recipe is None:
            return
        self._of_weight = _quantizer("tensorwise" if recipe == "delayed" else recipe, weight, 2)
        self._of_inputs = _quantizer(recipe, weight, 1)
        self._of_inputs.internal = True  # without what makes a tensor of torch's of it
        self._started = False
        self.stored = self._of_weight(weight)

    def round_weight(self) -> None:
        if self.recipe is not None:
            self._of_weight.update_quantized(self.weight, self.stored)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        tokens = len(x)
        rows: Any = x.contiguous()
        if self.recipe is not None:
            if tokens % ROWS:
                rows = F.pad(rows, (0, 0, 0, -tokens % ROWS))
            rows = self._rounded(rows)
        y: Tensor = general_gemm(self.stored, rows, out_dtype=x.dtype, bias=bias)[0]
        return y[:tokens]

    def _rounded(self, x: Tensor) -> Any:
        if self.recipe != "delayed":
            return self._of_inputs(x)
        quantizer = self._of_inputs
        if not self._started:  # there are no inputs before: their own scale
            quantizer.amax.copy_(x.abs().amax().float())
            self._rescale()
            self._started = True
        rounded = quantizer(x)  # `amax` becomes their largest value if that is larger
        self._rescale()
        return rounded

    def _rescale(self) -> None:
        """The scale of the next product's inputs, after this one's are rounded."""
        amax, scale = self._of_inputs.amax, self._of_inputs.scale
        scale.copy_(torch.where(amax > 0, amax.new_full((), FP8_MAX) / amax, scale))


def _quantizer(recipe: str, weight: Tensor, block: int) -> Any:
    """`block`: 2 for blocks of rows and columns, 1 for columns of one row."""
    kind, device = te.DType.kFloat8E4M3, weight.device
    match recipe:
        case "blockwise":
            return Float8BlockQuantizer(
                kind, rowwise=True, columnwise=False, block_scaling_dim=block
            )
        case "tensorwise":
            return Float8CurrentScalingQuantizer(kind, device, columnwise=False)
        case "delayed":
            scale, amax = (torch.ones(1, device=device) for _ in range(2))
            return Float8Quantizer(scale, amax, kind, columnwise=False)
    raise AssertionError(recipe)
