"""How a layer says which weights it needs, without knowing any checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from megatron_hybrid.parallel import RowParallelLinear


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A rectangle of one weight, and where it goes on this rank.

    `role` is the weight's name inside its layer ("q_proj.weight", "experts.3.up_proj.weight"); a
    model family maps it to a checkpoint's name. `shape` is the whole weight's, `source` this
    rank's part of it, `target` a view into a parameter, shaped like `source`. Constants of the
    model that become part of the weight: it is kept as multiplier * value + offset.
    """

    role: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: Tensor
    multiplier: float = 1.0
    offset: float = 0.0

    def put(self, values: Tensor) -> None:
        """Write the checkpoint's values, shaped like the target, in place."""
        self.target.copy_(values)
        if self.multiplier != 1.0:  # rounded once more to the weight's dtype
            self.target.copy_(self.target.float() * self.multiplier)
        if self.offset != 0.0:
            self.target.add_(self.offset)


def whole(role: str, target: Tensor) -> WeightPart:
    """A weight that every rank holds in full."""
    return WeightPart(role, tuple(target.shape), tuple(slice(0, n) for n in target.shape), target)


def shard(role: str, target: Tensor, dim: int, rank: int, total: int) -> WeightPart:
    """Rank's slice along `dim` of a weight that has `total` rows there, split evenly."""
    size = target.shape[dim]
    return section(role, target, dim, rank * size, total)


def section(role: str, target: Tensor, dim: int, start: int, total: int) -> WeightPart:
    """Rows [start, start + n) along `dim` of a weight that has `total` rows there."""
    shape = list(target.shape)
    source = [slice(0, n) for n in shape]
    source[dim] = slice(start, start + shape[dim])
    shape[dim] = total
    return WeightPart(role, tuple(shape), tuple(source), target)


Parts = Iterator[WeightPart]


def prefixed(name: str, parts: Parts) -> Parts:
    """The parts of a layer inside another one, which calls it `name`."""
    for part in parts:
        yield replace(part, role=f"{name}.{part.role}")


def inner_parts(module: nn.Module) -> Parts:
    """The parts of all layers inside one, by the names that they have in it."""
    for name, layer in module.named_children():
        yield from prefixed(name, cast(Any, layer).weight_parts())


class Rows(NamedTuple):
    """Some of this rank's rows of a projection that does several at once: `size` from row `start`
    on of the weight `role`, which has `total`."""

    role: str  # without .weight or .bias
    size: int
    start: int
    total: int
    multiplier: float = 1.0


def fused(
    rows: Iterable[Rows], weight: Tensor, bias: Tensor | None, input_multiplier: float = 1.0
) -> Parts:
    """All rows of a projection, in order. input_multiplier: a constant factor of what goes in."""
    rows = list(rows)
    for kind, parameter, factor in (("weight", weight, input_multiplier), ("bias", bias, 1.0)):
        if parameter is not None:
            targets = parameter.split([one.size for one in rows])
            for (role, _, start, total, own), target in zip(rows, targets, strict=True):
                part = section(f"{role}.{kind}", target, 0, start, total)
                yield replace(part, multiplier=own * factor)


def row_parallel(role: str, layer: RowParallelLinear, multiplier: float = 1.0) -> Parts:
    """This rank's columns, and the bias; multiplier: a constant factor of what they compute."""
    ranks = layer.parallel
    total = layer.weight.shape[1] * ranks.size
    parts = [shard(f"{role}.weight", layer.weight, 1, ranks.rank, total)]
    if layer.bias is not None:
        parts.append(whole(f"{role}.bias", layer.bias))
    for part in parts:
        yield replace(part, multiplier=multiplier)
