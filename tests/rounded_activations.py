"""transformers' model of an oracle's folder (tests/quantized_folders.py), computed as a format with
quantised activations does: the input of each quantised linear is rounded before the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.quantized_folders import linears, read
from tests.quantized_weights import E4M3, E4M3_MAX

Rounding = Callable[[Tensor], Tensor]


class RoundedActivations(TorchFunctionMode):
    """While it is entered, of a model in float32 on the CPU.

    `columns`: of the inputs that share a scale, where it is not the whole token. `noise`: relative,
    on the inputs, drawn with `seed`: it shows which results depend on a rounding that could as well
    have gone the other way.

    A linear is recognised by its weight's first row, which finds transformers' stacked experts too
    where they are computed one by one (experts_implementation="eager")."""

    def __init__(
        self,
        quantized: Path,
        dequantized: Path,
        columns: int | None,
        noise: float = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        stored = read(quantized)
        self._noise, self._generator = noise, torch.Generator().manual_seed(seed)
        self._roundings: dict[bytes, Rounding] = {}
        for name, tensor in read(dequantized).items():
            for module, weight in linears(name, tensor):
                rounding = _rounding(module, stored, columns)
                if rounding is not None:
                    self._roundings[_key(weight)] = rounding
        self.used: set[bytes] = set()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.linear:
            return function(*args, **kwargs)
        inputs, weight, *rest = args
        rounding = self._roundings.get(_key(weight))
        if rounding is not None:
            self.used.add(_key(weight))
            if self._noise:
                noise = torch.randn(inputs.shape, generator=self._generator)
                inputs = inputs * (1 + self._noise * noise)
            inputs = rounding(inputs)
        return function(inputs, weight, *rest, **kwargs)


def _key(weight: Tensor) -> bytes:
    return weight.detach()[0].numpy().tobytes()


def _rounding(module: str, stored: dict[str, Tensor], columns: int | None) -> Rounding | None:
    """What becomes of the module's inputs; None where they stay as they are."""
    weight = stored.get(f"{module}.weight")
    if weight is None or weight.dtype not in (E4M3, torch.int8):
        return None
    if weight.dtype == torch.int8:
        return lambda x: _rounded(x, x.abs().amax(-1, keepdim=True) / 127, torch.int8)
    static = stored.get(f"{module}.input_scale")
    if static is not None:
        scale = static.float().reshape(())
        return lambda x: _rounded(x, scale, E4M3)
    if columns is None:
        return lambda x: _rounded(x, x.abs().amax(-1, keepdim=True) / E4M3_MAX, E4M3)
    width = columns

    def in_groups(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
        scale = padded.abs().amax(-1, keepdim=True) / E4M3_MAX
        return _rounded(padded, scale, E4M3).flatten(-2)[..., : x.shape[-1]]

    return in_groups


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of `dtype` times the scale, or the largest there is."""
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    if dtype == torch.int8:
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(dtype).float() * scale
