"""How a layer says which weights it needs, without knowing any checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from megatron_hybrid.layers.linear import Linear, LinearPart, RowParallelLinear


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


Part = WeightPart | LinearPart
Parts = Iterator[Part]


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
    has_bias: bool = True  # where the projection has one; else its part is no weight


def fused(rows: Iterable[Rows], layer: Linear, input_multiplier: float = 1.0) -> Parts:
    """All rows of a projection, in order. input_multiplier: a constant factor of what goes in."""
    rows, first = list(rows), 0
    for role, size, start, total, own, _ in rows:
        source = slice(start, start + size), slice(0, layer.inputs)
        shape, factor = (total, layer.inputs), own * input_multiplier
        yield LinearPart(f"{role}.weight", shape, source, layer, first, factor)
        first += size
    if layer.bias is not None:
        for row, part in zip(rows, sections("bias", rows, layer.bias), strict=True):
            if row.has_bias:
                yield part


def sections(name: str, rows: Iterable[Rows], parameter: Tensor) -> Parts:
    """All rows of a parameter, in order, which are in the weights `role`.`name`."""
    rows = list(rows)
    targets = parameter.split([one.size for one in rows])
    for (role, _, start, total, multiplier, _), target in zip(rows, targets, strict=True):
        yield replace(section(f"{role}.{name}", target, 0, start, total), multiplier=multiplier)


def columns(role: str, layer: Linear, rank: int, total: int, first: int = 0, rows: int = 0) -> Part:
    """A rank's columns of a weight that has `total`, for `rows` rows of a layer from `first` on; 0:
    all."""
    rows = rows or layer.outputs
    source = slice(0, rows), slice(rank * layer.inputs, (rank + 1) * layer.inputs)
    return LinearPart(f"{role}.weight", (rows, total), source, layer, first)


def row_parallel(role: str, layer: RowParallelLinear, multiplier: float = 1.0) -> Parts:
    """This rank's columns, and the bias; multiplier: a constant factor of what they compute."""
    ranks = layer.parallel
    parts = [columns(role, layer, ranks.rank, layer.inputs * ranks.size)]
    if layer.bias is not None:
        parts.append(whole(f"{role}.bias", layer.bias))
    for part in parts:
        yield replace(part, multiplier=multiplier)
