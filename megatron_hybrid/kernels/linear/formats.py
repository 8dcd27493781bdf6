"""How the weight of a linear layer is kept where it is quantised, and what that means.

A weight W [N, K] (outputs, inputs) is kept as codes and scales, one scale for a block of rows and
columns:

    W[n, k] = (number(values[n, k]) - zero) * scale[n // rows, k // columns] * row_scale[n]

with the zero points and the scale of a whole row where the format has them. Everything may have the
experts of a layer as a first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0  # of float8_e4m3fn
FP4_MAX = 6.0  # of float4_e2m1
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth: sign
# Where a word has its codes: by four columns of it (the first or those 8 later) and pair of
# columns, where the lower three bits begin and where the sign is, in the lower half of the word for
# the first of the pair and in the upper one for the second. A shift and a mask, or two of them,
# bring a pair to the places of two bfloat16's exponents and signs (codes.FP4_ASM).
FP4_PLACES = {(0, 0): (6, 15), (1, 0): (3, 12), (0, 1): (0, 14), (1, 1): (9, 13)}
# (type that codes are kept in, bits of a code)
NUMBERS = {
    "float8_e4m3fn": (torch.float8_e4m3fn, 8),
    "int8": (torch.int8, 8),
    "uint8": (torch.uint8, 8),
    "uint4": (torch.uint8, 4),
    "float4_e2m1": (torch.uint8, 4),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`numbers`: a key of NUMBERS; of codes of 4 bits two share a byte (pack_codes).
    `rows`, `columns`: that share a scale; None: all columns. `zero_points`: unsigned codes have
    one for each block, otherwise half of their range is subtracted.

    `activations`: how the inputs are quantised, in the same 8-bit numbers: "none", "token" (one
    scale for each row), "group" (one for each row and `columns`), "tensor" (a constant, which the
    checkpoint holds) or "tensor_dynamic" (one for all rows of a step, taken as "token")."""

    numbers: str
    rows: int = 1
    columns: int | None = None
    zero_points: bool = False
    activations: str = "none"

    @property
    def bits(self) -> int:
        """Of a code."""
        return NUMBERS[self.numbers][1]

    def __str__(self) -> str:
        scales = "row" if self.columns is None else f"{self.rows}x{self.columns}"
        text = f"{self.numbers}, a scale for each {scales}"
        return text if self.activations == "none" else f"{text}, inputs by {self.activations}"

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a weight of so many rows and columns has."""
        return -(-rows // self.rows), 1 if self.columns is None else -(-columns // self.columns)

    def empty(self, rows: int, columns: int) -> QuantizedWeight:
        """Memory for a weight [rows, columns]; `with torch.device(...)` decides where."""
        dtype, bits = NUMBERS[self.numbers]
        grid, is_fp4 = self.grid(rows, columns), self.numbers == "float4_e2m1"
        return QuantizedWeight(
            format=self,
            values=torch.empty(rows, columns * bits // 8, dtype=dtype),
            scale=torch.empty(grid, dtype=torch.float8_e4m3fn if is_fp4 else torch.float32),
            zero=torch.empty(grid, dtype=torch.uint8) if self.zero_points else None,
            row_scale=torch.empty(rows) if is_fp4 else None,
            input_scale=torch.zeros(()) if self.activations == "tensor" else None,
        )

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """weight [N, K], rounded to the nearest: scales come from the largest value of a block. A
        constant scale of the inputs is left at 0, which changes none that is there already."""
        weight = weight.float()
        (rows, columns), grid = weight.shape, self.grid(*weight.shape)
        width = self.columns or columns
        blocks = _blocks(weight, grid, self.rows, width)  # [.., rows of a block, .., columns]
        zero = row_scale = None
        if self.zero_points:
            low = blocks.amin((1, 3)).clamp(max=0)
            scale = (blocks.amax((1, 3)).clamp(min=0) - low) / (2**self.bits - 1)
            scale = torch.where(scale > 0, scale, 1)
            zero = (-low / scale).round().to(torch.uint8)
        else:
            largest = blocks.abs().amax((1, 3))
            scale = largest / _largest_number(self.numbers)
            if self.numbers == "float4_e2m1":  # two scales: one for the whole, e4m3 for a block
                row_scale = (largest.max() / (FP4_MAX * FP8_MAX)).clamp(min=1e-30).repeat(rows)
                scale = (scale / row_scale[0]).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
            scale = torch.where(scale.float() > 0, scale.float(), 1).to(scale.dtype)
        factor = scale.float() * (1 if row_scale is None else row_scale[0])
        codes = blocks / factor[:, None, :, None]
        if zero is not None:
            codes = codes + zero[:, None, :, None]
        codes = codes.reshape(grid[0] * self.rows, -1)[:rows, :columns]
        values = pack_codes(_rounded(codes, self), self)
        input_scale = torch.zeros((), device=weight.device)
        given = input_scale if self.activations == "tensor" else None
        return QuantizedWeight(self, values, scale, zero, row_scale, given)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] in a format, or [experts, N, K]."""

    format: WeightFormat
    values: Tensor  # [N, K], codes of 4 bits: [N, K / 2]
    scale: Tensor  # [N / rows, K / columns], rounded up; float32, of float4_e2m1 float8_e4m3fn
    zero: Tensor | None = None  # uint8, like scale
    row_scale: Tensor | None = None  # [N] float32
    input_scale: Tensor | None = None  # [] float32, of all rows' inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *first, columns = self.values.shape
        return (*first, columns * 8 // self.format.bits)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    def words(self) -> Tensor:
        """The codes, of 4 bits eight at a time as int32: [N, K / 8]."""
        return self.values.view(torch.int32) if self.format.bits == 4 else self.values

    def tensors(self) -> dict[str, Tensor]:
        """What it is kept in, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def row_range(self, start: int, stop: int) -> QuantizedWeight:
        """Some rows of a weight [N, K], as views; `start` is a multiple of the format's rows."""
        block = self.format.rows
        blocks = slice(start // block, -(-stop // block))
        return replace(
            self,
            values=self.values[start:stop],
            scale=self.scale[blocks],
            zero=None if self.zero is None else self.zero[blocks],
            row_scale=None if self.row_scale is None else self.row_scale[start:stop],
        )

    def stacked(self, experts: int) -> QuantizedWeight:
        """A weight [experts * N, K] as [experts, N, K]."""

        def view(rows: Tensor) -> Tensor:
            return rows.unflatten(0, (experts, -1))

        return replace(
            self,
            values=view(self.values),
            scale=view(self.scale),
            zero=None if self.zero is None else view(self.zero),
            row_scale=None if self.row_scale is None else view(self.row_scale),
        )

    def flat(self) -> QuantizedWeight:
        """The reverse of `stacked`."""
        return replace(
            self,
            values=self.values.flatten(0, 1),
            scale=self.scale.flatten(0, 1),
            zero=None if self.zero is None else self.zero.flatten(0, 1),
            row_scale=None if self.row_scale is None else self.row_scale.flatten(),
        )

    def expert(self, index: int) -> QuantizedWeight:
        """One of [experts, N, K]."""
        return replace(
            self,
            values=self.values[index],
            scale=self.scale[index],
            zero=None if self.zero is None else self.zero[index],
            row_scale=None if self.row_scale is None else self.row_scale[index],
        )

    def copy_(self, other: QuantizedWeight) -> None:
        """Take over another weight of this shape and format. Of two constant scales of inputs the
        larger one stays: layers whose weights lie in one have the same inputs."""
        theirs = other.tensors()
        for name, mine in self.tensors().items():
            if name == "input_scale":
                mine.copy_(torch.maximum(mine, theirs[name].to(mine.device)))
            else:
                mine.copy_(theirs[name])

    def times(self, factor: float) -> QuantizedWeight:
        """The weight multiplied by a constant: not rounded again."""
        if self.row_scale is not None:
            return replace(self, row_scale=self.row_scale * factor)
        return replace(self, scale=self.scale * factor)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] or [experts, N, K], computed in float32."""
        numbers = code_numbers(unpack_codes(self.values, self.format), self.format)
        if self.format.numbers.startswith("uint"):
            zero = 2 ** (self.format.bits - 1) if self.zero is None else self._spread(self.zero)
            numbers = numbers - zero
        weight = numbers * self._spread(self.scale)
        if self.row_scale is not None:
            weight = weight * self.row_scale[..., None]
        return weight.to(dtype)

    def _spread(self, grid: Tensor) -> Tensor:
        """What blocks have, for each of their weights."""
        rows, columns = self.shape[-2:]
        grid = grid.float()
        if self.format.columns is not None:
            grid = grid.repeat_interleave(self.format.columns, -1)[..., :columns]
        if self.format.rows > 1:
            grid = grid.repeat_interleave(self.format.rows, -2)[..., :rows, :]
        return grid


Weight = Tensor | QuantizedWeight


def is_nvfp4(weight: Weight) -> bool:
    """Whether it is float4_e2m1 with a scale for each 16 columns, and inputs stay as they are."""
    format = format_of(weight)
    kind = None if format is None else (format.numbers, format.columns, format.activations)
    return kind == ("float4_e2m1", 16, "none")


def format_of(weight: Weight) -> WeightFormat | None:
    """None: it is not quantised."""
    return weight.format if isinstance(weight, QuantizedWeight) else None


def pack_codes(codes: Tensor, format: WeightFormat) -> Tensor:
    """[..., K] codes as they are kept. Of 4 bits, 16 columns are two words of four bytes: columns 0
    to 3 and 8 to 11, the others. Of uint4 the first four are the lower halves of a word's bytes;
    float4_e2m1 as FP4_PLACES says."""
    if format.bits == 8:
        return codes
    if format.numbers == "float4_e2m1":
        halves = codes.unflatten(-1, (-1, 2, 2, 2, 2)).short()
        words = torch.zeros_like(halves[..., 0, :, 0, :])  # [..., words, halves of words]
        for (eight, pair), (magnitude, sign) in FP4_PLACES.items():
            code = halves[..., eight, :, pair, :]
            words |= (code & 7) << magnitude | code >> 3 << sign
        return words.view(torch.uint8).flatten(-3)
    halves = codes.unflatten(-1, (-1, 2, 8))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)


def unpack_codes(values: Tensor, format: WeightFormat) -> Tensor:
    """The reverse."""
    if format.bits == 8:
        return values
    if format.numbers == "float4_e2m1":
        words = values.view(torch.int16).unflatten(-1, (-1, 2, 2))
        codes = values.new_empty(*words.shape[:-2], 2, 2, 2, 2)
        for (eight, pair), (magnitude, sign) in FP4_PLACES.items():
            codes[..., eight, :, pair, :] = words >> magnitude & 7 | (words >> sign & 1) << 3
        return codes.flatten(-5)
    halves = values.unflatten(-1, (-1, 1, 8))
    return torch.cat((halves & 15, halves >> 4), -2).flatten(-3)


def code_numbers(codes: Tensor, format: WeightFormat) -> Tensor:
    """What codes stand for, float32."""
    if format.numbers != "float4_e2m1":
        return codes.float()
    magnitude = torch.tensor(FP4_NUMBERS, device=codes.device)[(codes % 8).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def _largest_number(numbers: str) -> float:
    bits = NUMBERS[numbers][1]
    integer = 127.0 if numbers == "int8" else (2**bits - 1) / 2
    return {"float8_e4m3fn": FP8_MAX, "float4_e2m1": FP4_MAX}.get(numbers, integer)


def _blocks(weight: Tensor, grid: tuple[int, int], rows: int, columns: int) -> Tensor:
    """[blocks, rows, blocks, columns], zeros past the end."""
    below, behind = grid[0] * rows - weight.shape[0], grid[1] * columns - weight.shape[1]
    padded = F.pad(weight, (0, behind, 0, below)) if below or behind else weight
    return padded.view(grid[0], rows, grid[1], columns)


def _rounded(codes: Tensor, format: WeightFormat) -> Tensor:
    """Numbers to the nearest code."""
    match format.numbers:
        case "float8_e4m3fn":
            return codes.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        case "int8":
            return codes.round().clamp(-127, 127).to(torch.int8)
        case "float4_e2m1":
            table = torch.tensor(FP4_NUMBERS, device=codes.device)
            middles = (table[1:] + table[:-1]) / 2
            return (torch.bucketize(codes.abs(), middles) + 8 * (codes < 0)).to(torch.uint8)
        case _:
            middle = 0 if format.zero_points else 2 ** (format.bits - 1)
            return (codes + middle).round().clamp(0, 2**format.bits - 1).to(torch.uint8)
