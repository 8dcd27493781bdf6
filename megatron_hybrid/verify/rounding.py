"""What an engine rounds besides its own arithmetic, done to transformers' model: the inputs of
quantised products, weights that are rounded while they are read, keys and values in FP8."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_hybrid.kernels.linear.formats import FP8_MAX, WeightFormat
from megatron_hybrid.verify.dequantized import InputRounding, Weight

# Modules that --quantization leaves as they are, by transformers' names.
_LEFT = re.compile(
    r"(lm_head|embed\w*|embeddings|norm\w*|gate|router|router\.layer|shared_expert_gate|conv\w*"
    r"|in_proj_(a|b|ba)|x_proj|dt_proj|kv_b_proj)\.weight$"
)
_MARK = 8  # numbers of a weight's first row, by which it is known again


class Roundings(TorchFunctionMode):
    """While it is entered, products whose weights were `noted` have their inputs rounded; with
    `fp8_kv`, attention its keys and values. A weight is known by the beginning of its first row,
    however transformers stacked or joined it."""

    def __init__(self, dtype: torch.dtype, fp8_kv: bool, on_the_fly: WeightFormat | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._fp8_kv = fp8_kv
        self._on_the_fly = on_the_fly
        self._known: dict[bytes, InputRounding] = {}

    def noted(self, weight: Weight) -> Weight:
        """The weight as the engine has it; when it is read, its inputs are rounded from then on."""

        def read() -> Tensor:
            values, roundings = weight.read(), weight.roundings()
            matrices = values if values.ndim == 3 else values[None]  # experts in one tensor
            if (format := self._format_of(weight, values)) is not None:
                matrices = torch.stack([format.quantize(one).dequantize() for one in matrices])
                values = matrices.view_as(values)
                rounding = InputRounding(format.numbers, format.activations, format.columns)
                roundings = [rounding] * len(matrices)
            for matrix, rounding in zip(matrices, roundings, strict=False):
                self._known[_mark(matrix.to(self._dtype))] = rounding
            return values

        return Weight(weight.name, weight.numel, read)

    def _format_of(self, weight: Weight, values: Tensor) -> WeightFormat | None:
        if values.ndim not in (2, 3) or _LEFT.search(weight.name):
            return None
        return self._on_the_fly

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As TorchFunctionMode calls it."""
        if function is F.linear and self._known:
            rounding = self._known.get(_mark(args[1]))
            if rounding is not None:
                args = (_rounded(args[0], rounding), *args[1:])
        elif function is F.scaled_dot_product_attention and self._fp8_kv:
            args = (args[0], _in_fp8(args[1]), _in_fp8(args[2]), *args[3:])
        return function(*args, **(kwargs or {}))


def _mark(weight: Tensor) -> bytes:
    first: Any = weight[0, :_MARK].detach().float().cpu().numpy()
    return bytes(first.tobytes())


def _in_fp8(values: Tensor) -> Tensor:
    limited = values.float().clamp(-FP8_MAX, FP8_MAX)
    return limited.to(torch.float8_e4m3fn).to(values.dtype)


def _rounded(x: Tensor, rounding: InputRounding) -> Tensor:
    width = x.shape[-1]
    group = rounding.columns if rounding.activations == "group" and rounding.columns else width
    groups = F.pad(x.float(), (0, -width % group)).unflatten(-1, (-1, group))
    is_int8 = rounding.numbers == "int8"
    largest = 127.0 if is_int8 else FP8_MAX
    scale = groups.abs().amax(-1, keepdim=True) / largest
    if rounding.scale is not None:
        scale = torch.full_like(scale, rounding.scale)
    scale = torch.where(scale > 0, scale, 1)
    numbers = (groups / scale).clamp(-largest, largest)
    numbers = numbers.round() if is_int8 else numbers.to(torch.float8_e4m3fn).float()
    return (numbers * scale).flatten(-2)[..., :width].to(x.dtype)
