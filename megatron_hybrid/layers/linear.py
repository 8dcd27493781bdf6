"""Linear layers, whose weights may be quantised; tensor-parallel ranks have some of the rows, or of
the columns, of a checkpoint's weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight, WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.parallel import RankGroup


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Some rows of a linear layer on this rank, and where a checkpoint has them.

    `role`: the weight's name inside its layer, `shape` the whole weight's, `source` the rows and
    columns of it that are this rank's; they are the layer's from row `first` on. The weight is kept
    as `multiplier` * value.
    """

    role: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    layer: Linear
    first: int
    multiplier: float = 1.0

    @property
    def size(self) -> int:
        """Rows."""
        return self.source[0].stop - self.source[0].start

    @property
    def target(self) -> Weight:
        """The layer's memory for them."""
        return self.layer.row_range(self.first, self.first + self.size)

    def put(self, values: Tensor) -> None:
        """Write the checkpoint's values, shaped like the target, in place and in its format."""
        target = self.target
        if isinstance(target, QuantizedWeight):
            target.copy_(target.format.quantize(values.to(target.device).float() * self.multiplier))
            return
        target.copy_(values)
        if self.multiplier != 1.0:  # rounded once more to the weight's dtype
            target.copy_(target.float() * self.multiplier)


# The format of a role's weight; None: the model's type.
Formats = Callable[[str], WeightFormat | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of a layer in one format."""

    start: int
    stop: int
    weight: Weight


class Linear(nn.Module):
    """y = x W^T + b on this rank. W is there after `allocate`: in one piece, or, where formats
    differ between rows that are computed together, in several runs of rows.

    wide: W and more rows behind it, after `widen`: [outputs + rows, inputs].
    """

    bias: Tensor | None
    wide: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.outputs, self.dtype = inputs, outputs, dtype
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False)
        self._runs: list[_Run] = []
        self.reader: Reader | None = None
        self.wide = None

    def read_plain_rows(self) -> None:
        """Inputs come, however they are rounded, with what they were before."""
        if self.reader is not None:
            self.reader = self.reader._replace(plain=True)

    def allocate(self, parts: Iterable[LinearPart], formats: Formats) -> None:
        """Memory for all rows, which `parts` say in order. What a format cannot keep, a few columns
        that a split over ranks leaves, is kept in the layer's type."""
        chosen = [(formats(part.role), part) for part in parts]
        start = 0
        for format, group in groupby(chosen, key=lambda one: one[0]):
            rows = [part for _, part in group]
            stop = rows[-1].first + rows[-1].size
            if rows[-1] is chosen[-1][1]:
                stop = self.outputs  # the last ranks have some rows past the end of a vocabulary
            weight: Weight
            fitting = None if format is None else _fitting(format, rows, start)
            if fitting is None:
                weight = torch.empty(stop - start, self.inputs, dtype=self.dtype)
            else:
                weight = fitting.empty(stop - start, self.inputs)
            self._keep(weight, len(self._runs))
            if stop > rows[-1].first + rows[-1].size:
                for tensor in [weight] if isinstance(weight, Tensor) else weight.tensors().values():
                    tensor.zero_()
            self._runs.append(_Run(start, stop, weight))
            start = stop
        assert start == self.outputs
        self.reader = self._reader()

    def widen(self, rows: int) -> None:
        """Memory for more rows behind W, all zeros, which is no part of the layer's weights: for
        one product with both. Of a layer that `is_plain`."""
        (run,) = self._runs
        assert isinstance(run.weight, Tensor)
        wide = run.weight.new_zeros((self.outputs + rows, self.inputs))
        wide[: self.outputs] = run.weight
        self.wide, self._runs = wide, [replace(run, weight=wide[: self.outputs])]
        self._keep(self._runs[0].weight, 0)

    def _reader(self) -> Reader | None:
        """How the layer takes its inputs, where whoever makes them can round them: all runs that
        round them have to do it alike."""
        rounding = [
            run.weight
            for run in self._runs
            if isinstance(run.weight, QuantizedWeight) and run.weight.format.activations != "none"
        ]
        if not rounding or self.inputs % 16:
            return None
        alike = {
            (one.format.numbers, one.format.activations, one.format.columns) for one in rounding
        }
        if len(alike) > 1 or (len(rounding) > 1 and rounding[0].input_scale is not None):
            return None
        first = rounding[0]
        return Reader(first.format, first.input_scale, len(rounding) < len(self._runs))

    def _keep(self, weight: Weight, run: int) -> None:
        """Registered, so that it is counted with the model's memory."""
        tensors = {"": weight} if isinstance(weight, Tensor) else weight.tensors()
        for name, tensor in tensors.items():
            kept = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(f"run{run}{name and '_'}{name}", kept)

    @property
    def weight(self) -> Weight:
        """Of a layer in one format."""
        (run,) = self._runs
        return run.weight

    @property
    def is_plain(self) -> bool:
        """Whether it is one weight that is not quantised, without a bias."""
        return self.is_one_weight and isinstance(self.weight, Tensor)

    @property
    def is_one_weight(self) -> bool:
        """Whether it is one weight, quantised or not, without a bias."""
        return self.bias is None and len(self._runs) == 1

    def stacked(self, experts: int) -> Weight:
        """The weight [experts, outputs / experts, inputs] of as many layers that lie one below the
        other. Raises ConfigurationError where they are in several formats."""
        if len(self._runs) > 1:
            raise ConfigurationError(
                "The experts of one layer are in several formats "
                f"({', '.join(sorted({str(format) for format, _ in self.formats}))}), which is not "
                "supported."
            )
        weight = self.weight
        if isinstance(weight, Tensor):
            return weight.view(experts, -1, self.inputs)
        return weight.stacked(experts)

    def plain_weights(self) -> Iterator[Tensor]:
        """Of its runs that are not quantised."""
        for run in self._runs:
            if isinstance(run.weight, Tensor):
                yield run.weight

    def kept_bytes(self) -> Iterator[tuple[str, int]]:
        """Of each run how it is kept and what it takes, and of the bias."""
        for run in self._runs:
            if isinstance(run.weight, QuantizedWeight):
                tensors = run.weight.tensors().values()
                yield str(run.weight.format), sum(tensor.nbytes for tensor in tensors)
            else:
                yield str(run.weight.dtype), run.weight.nbytes
        if self.bias is not None:
            yield str(self.bias.dtype), self.bias.nbytes

    @property
    def formats(self) -> list[tuple[WeightFormat | None, int]]:
        """Of each run the format, and how many rows it has."""
        return [
            (None if isinstance(run.weight, Tensor) else run.weight.format, run.stop - run.start)
            for run in self._runs
        ]

    def row_range(self, start: int, stop: int) -> Weight:
        """Memory of rows that are in one format."""
        for run in self._runs:
            if run.start <= start and stop <= run.stop:
                if isinstance(run.weight, Tensor):
                    return run.weight[start - run.start : stop - run.start]
                return run.weight.row_range(start - run.start, stop - run.start)
        raise ValueError(f"Rows {start} to {stop} are not in one run.")

    def forward(self, x: Inputs, kernels: KernelSet) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]; with what the step's adapters add."""
        if kernels.adapters is not None and self.wide is not None:
            return kernels.adapters.multiply(self, x, kernels.linear)
        if len(self._runs) == 1:
            y = self._product(x, self._runs[0], kernels)
        else:
            y = torch.cat([self._product(x, run, kernels) for run in self._runs], dim=1)
        if kernels.adapters is not None:
            kernels.adapters.add(self, y, x)
        return y

    def _product(self, x: Inputs, run: _Run, kernels: KernelSet) -> Tensor:
        bias = self._bias
        if bias is not None and len(self._runs) > 1:
            bias = bias[run.start : run.stop]
        return kernels.linear.multiply(x, run.weight, bias)

    @property
    def _bias(self) -> Tensor | None:
        return self.bias


class ColumnParallelLinear(Linear):
    """This rank computes some of the outputs, and those wholly, so that it may go on with them."""

    def activated(
        self, x: Inputs, activation: str, gated: bool, into: Reader | None, kernels: KernelSet
    ) -> Inputs:
        """What Activation.activate makes of `forward`."""
        if into is None and kernels.adapters is not None and self.wide is not None:
            return kernels.adapters.multiply(self, x, kernels.linear, activation, gated)
        if into is None and len(self._runs) == 1 and kernels.adapters is None:
            y = kernels.linear.multiply_activated(
                x, self._runs[0].weight, self._bias, activation, gated
            )
            if y is not None:
                return y
        return kernels.activation.activate(self.forward(x, kernels), activation, gated, into)

    def split(self, x: Inputs, sections: list[int], kernels: KernelSet) -> list[Tensor]:
        """What `forward` gives, cut into columns; without a copy where formats change there."""
        in_one = len(self._runs) == 1 or kernels.adapters is not None
        if in_one or not self._begins_with_sections(sections):
            return list(self.forward(x, kernels).split_with_sizes(sections, 1))
        cut: list[Tensor] = []
        for run in self._runs:
            covered, sizes = 0, list[int]()
            while covered < run.stop - run.start:
                sizes.append(sections[len(cut) + len(sizes)])
                covered += sizes[-1]
            cut += self._product(x, run, kernels).split_with_sizes(sizes, 1)
        return cut

    def _begins_with_sections(self, sections: list[int]) -> bool:
        """Whether no format changes within one."""
        bounds = {sum(sections[:i]) for i in range(len(sections))}
        return all(run.start in bounds for run in self._runs)

    def rows(self, x: Tensor, start: int, stop: int, kernels: KernelSet) -> Tensor:
        """Some of the outputs alone: [tokens, inputs] -> [tokens, stop - start]. Of a layer without
        adapters."""
        if len(self._runs) > 1 or isinstance(self.weight, QuantizedWeight):
            return self.forward(x, kernels)[:, start:stop]
        bias = None if self.bias is None else self.bias[start:stop]
        return F.linear(x, self.weight[start:stop], bias)


class RowParallelLinear(Linear):
    """y = sum over ranks of x_rank W_rank^T, plus the bias once.

    `sums`: False leaves the sum to whoever uses the result, which is this rank's part of it then.
    """

    def __init__(
        self,
        columns: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parallel: RankGroup,
        sums: bool = True,
    ) -> None:
        """`columns`: this rank's."""
        super().__init__(columns, outputs, bias=bias, dtype=dtype)
        self.parallel = parallel
        self.sums = sums

    def forward(self, x: Inputs, kernels: KernelSet) -> Tensor:
        """[tokens, this rank's columns] -> [tokens, outputs]."""
        y = super().forward(x, kernels)
        return self.parallel.all_reduce(y) if self.sums else y

    @property
    def _bias(self) -> Tensor | None:
        return self.bias if self.parallel.is_first else None


def allocate_linears(parts: Iterable[object], formats: Formats) -> None:
    """Memory for the linear layers that these parts of a model belong to."""
    linear = [part for part in parts if isinstance(part, LinearPart)]
    for layer in dict.fromkeys(part.layer for part in linear):
        own = sorted((part for part in linear if part.layer is layer), key=lambda part: part.first)
        layer.allocate(own, formats)


def _fitting(format: WeightFormat, parts: list[LinearPart], start: int) -> WeightFormat | None:
    """The format with blocks so fine that each lies within one block of the checkpoint's: a rank's
    rows and columns may begin inside of those. None where too few columns would share a scale, or
    a byte."""
    rows, columns = format.rows, format.columns
    for part in parts:
        rows = math.gcd(rows, part.source[0].start, part.first - start)
        if part is not parts[-1]:
            rows = math.gcd(rows, part.size)
        if columns is not None:
            inputs = part.source[1]
            columns = math.gcd(columns, inputs.start)
            if inputs.stop != part.shape[1]:
                columns = math.gcd(columns, inputs.stop)
    odd = format.bits == 4 and (parts[0].layer.inputs % 16 or (columns or 16) % 16)
    if odd or (columns is not None and columns < 8):
        return None
    return replace(format, rows=rows, columns=columns)
