"""Weights of quantised checkpoints: which tensors each layout has, read as QuantizedWeight.

A rank reads its rectangle of a weight: codes, and of the scales those that it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.kernels.linear.formats import (
    NUMBERS,
    QuantizedWeight,
    WeightFormat,
    code_numbers,
    pack_codes,
)
from megatron_hybrid.models.checkpoints.quantization import Quantization, StoredFormat
from megatron_hybrid.models.checkpoints.weight_source import WeightSource
from megatron_hybrid.models.families.family import Location

Shape = tuple[int, ...]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes in a word
# What a layer may have besides, which products here have no use for.
_UNUSED = (
    "input_scale", "input_global_scale", "output_scale", "weight_shape", "g_idx", "qzeros",
    "weight_zero_point", "weight_g_idx",
)  # fmt: skip


def weight_format(stored: StoredFormat | None) -> WeightFormat | None:
    """How a model keeps a weight that a checkpoint stores so; None: in the model's own type, which
    is what becomes of columns in an order of their own (act_order)."""
    if stored is None or stored.act_order:
        return None
    rows, columns = 1, None
    if stored.scales == "block" and stored.block is not None:
        rows, columns = stored.block
    elif stored.scales == "group":
        columns = stored.group_size
    activations = "token" if stored.activations == "tensor_dynamic" else stored.activations
    return WeightFormat(stored.numbers, rows, columns, not stored.symmetric, activations)


def stored_format(
    said: Quantization | None, name: str, names: Collection[str] | None
) -> StoredFormat | None:
    """How a weight is stored of which the configuration says something. `name`: where it were if
    it was not quantised; `names`: of the tensors that are there, None if nobody has looked. Some
    configurations do not list what was left in 16 bits: then there is the weight, and no scale."""
    module = name.removesuffix(".weight")
    stored = None if said is None else said.format_of(module)
    if stored is None or names is None or name not in names:
        return stored
    scales = (f"{name}_scale", f"{name}_scale_inv", f"{module}.scales")
    return stored if any(scale in names for scale in scales) else None


def used_place(places: Sequence[Location], names: Collection[str] | None) -> Location:
    """Of the places where a weight may be, the usual one first, the one where it is. `names`: of
    the tensors that are there, None if nobody has looked."""
    for place in places:
        module = place.name.removesuffix(".weight")
        codes = (place.name, f"{place.name}_packed", f"{module}.qweight")
        if names is not None and any(name in names for name in codes):
            return place
    return places[0]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The weight [rows, columns] of one linear layer in a checkpoint; `place`: where it were if it
    was not quantised."""

    source: WeightSource
    place: Location
    stored: StoredFormat
    rows: int  # of this weight; several may lie in one tensor (Location)
    columns: int

    @property
    def module(self) -> str:
        """The layer's name."""
        return self.place.name.removesuffix(".weight")

    @property
    def names(self) -> Mapping[str, str]:
        """The tensors that are read, by what they hold."""
        stored, module = self.stored, self.module
        weight = module if self.place.name == module else f"{module}.weight"
        if stored.layout in ("gptq", "awq"):
            names = {"codes": f"{module}.qweight", "scale": f"{module}.scales"}
            if stored.layout == "gptq" or not stored.symmetric:
                names["zero"] = f"{module}.qzeros"
            if stored.act_order:
                names["order"] = f"{module}.g_idx"
            return names
        names = {"codes": weight, "scale": f"{weight}_scale"}
        if stored.layout == "fp8" and f"{weight}_scale_inv" in self.source.names:
            names["scale"] += "_inv"
        if stored.layout == "compressed_tensors" and stored.numbers.startswith(("uint", "float4")):
            names["codes"] += "_packed"
        if stored.numbers == "float4_e2m1":
            modelopt = stored.layout == "modelopt"
            names["whole"] = f"{weight}_scale_2" if modelopt else f"{weight}_global_scale"
        if not stored.symmetric:
            names["zero"] = f"{weight}_zero_point"
        if stored.act_order:
            names["order"] = f"{weight}_g_idx"
        if stored.activations == "tensor":
            names["input"] = f"{module}.input_scale"
            if names["input"] not in self.source.names:
                old = f"{module}.activation_scale"
                names["input"] = old if old in self.source.names else names["input"]
        return names

    @property
    def all_names(self) -> set[str]:
        """Those, and what else belongs to them."""
        others = (f"{self.module}.{name}" for name in _UNUSED)
        return {*self.names.values(), *(name for name in others if name in self.source.names)}

    def check(self) -> None:
        """Raise WeightsError for a tensor that is missing, or has another shape or type than the
        configuration says, or where rows of several weights take turns. Reads no values."""
        if self.place.interleaved:
            raise WeightsError(
                f"Weight {self.place.name!r} in {self.source.where} is quantised "
                f"({self.stored.layout}, {self.stored.numbers}), and the rows of gates and of what "
                "they are gates of take turns in it, which is not supported together."
            )
        expected = self._expected_shapes()
        for kind, name in self.names.items():
            if name not in self.source.names:
                raise WeightsError(
                    f"Weight {name!r} is missing in {self.source.where}, whose configuration says "
                    f"that {self.module} is quantised ({self.stored.layout}, "
                    f"{self.stored.numbers})."
                )
            shape = self.source.shape(name)
            if shape not in expected[kind]:
                wanted = " or ".join(str(list(one)) for one in expected[kind])
                raise WeightsError(
                    f"Weight {name!r} has shape {list(shape)}; its configuration and its "
                    f"quantisation make it {wanted}."
                )
        dtype = self.source.dtype(self.names["codes"])
        if dtype not in self._code_types():
            raise WeightsError(
                f"Weight {self.names['codes']!r} in {self.source.where} is {dtype}, but the "
                f"configuration says that it is quantised ({self.stored.layout}, "
                f"{self.stored.numbers})."
            )

    def check_values(self) -> None:
        """Raise WeightsError for scales that are no positive numbers, or zero points where there
        are none. Reads those alone."""
        self._scale()
        for kind in ("whole", "input"):
            if kind in self.names:
                self._number(kind)
        if self.stored.layout == "gptq" and self.stored.symmetric:
            self._check_middle(self._zeros())

    def _code_types(self) -> tuple[torch.dtype, ...]:
        if self.stored.numbers == "float8_e4m3fn":
            return (torch.float8_e4m3fn,)
        if self.stored.numbers == "float4_e2m1":
            return (torch.uint8,)
        return (torch.int8,) if self.stored.numbers == "int8" else (torch.int32,)

    def _expected_shapes(self) -> dict[str, list[Shape]]:
        rows, columns = self.place.all_rows(self.rows), self.columns
        per_word = 32 // self._bits
        block, stored = self._block, self.stored
        grid = -(-rows // block[0]), -(-columns // block[1])
        scale, zero = list[Shape]([grid]), list[Shape]([grid])
        if grid[1] == 1:
            scale.append((grid[0],))
        if grid == (1, 1):
            scale.append(())
        if stored.scales == "block":  # ModelOpt's
            scale.append((grid[0], 1, grid[1], 1))
        codes: Shape = (rows, columns)
        if stored.layout == "gptq":
            codes = (columns // per_word, rows)
            scale, zero = [grid[::-1]], [(grid[1], rows // per_word)]
        elif stored.layout == "awq":
            codes = (columns, rows // per_word)
            scale, zero = [grid[::-1]], [(grid[1], rows // per_word)]
        elif stored.numbers == "float4_e2m1":
            codes = (rows, columns // 2)
        elif stored.numbers.startswith("uint"):
            codes = (rows, -(-columns // per_word))
            zero = [(-(-rows // per_word), grid[1])]
        shapes: dict[str, list[Shape]] = {
            "codes": [codes],
            "scale": scale,
            "zero": zero,
            "whole": [(), (1,)],
            "input": [(), (1,)],
            "order": [(columns,)],
        }
        if self.place.index is not None:
            stacked = (self.place.stacked,)
            shapes = {kind: [stacked + s for s in some] for kind, some in shapes.items()}
        return shapes

    @property
    def _bits(self) -> int:
        return NUMBERS[self.stored.numbers][1]

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale in the checkpoint."""
        if self.stored.scales == "tensor":
            return self.place.all_rows(self.rows), self.columns
        if self.stored.scales == "block" and self.stored.block is not None:
            return self.stored.block
        group = self.stored.group_size if self.stored.scales == "group" else None
        return 1, group or self.columns

    # ------------------------------------------------------------------ values

    def read(
        self, rows: slice, columns: slice, format: WeightFormat, device: torch.device
    ) -> QuantizedWeight:
        """A rectangle, in a format whose blocks lie within the checkpoint's. Raises WeightsError
        for scales that are no positive numbers."""
        rows = self._rows_in_tensor(rows)
        codes = self._codes(rows, columns).to(device)
        scale = self._on_grid(self._scale(), rows, columns, format).to(device)
        zero = row_scale = given = None
        if format.zero_points:
            zero = self._on_grid(self._zeros(), rows, columns, format).to(device)
        if format.numbers == "float4_e2m1":
            row_scale = self._whole_scale().to(device).expand(codes.shape[0])
            scale = scale.to(torch.float8_e4m3fn)
        if format.activations == "tensor":
            given = self._number("input").to(device)
        return QuantizedWeight(format, pack_codes(codes, format), scale, zero, row_scale, given)

    def values(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """A rectangle as float32 values."""
        stored, rows = self.stored, self._rows_in_tensor(rows)
        codes = self._codes(rows, columns)
        numbers = code_numbers(codes, WeightFormat(stored.numbers))
        # Of each column its place in the table of scales.
        places = torch.arange(columns.start, columns.stop) // self._block[1]
        if stored.act_order:
            places = self._read("order")[columns].long()
        scale = self._scale()
        if places.min() < 0 or places.max() >= scale.shape[1]:
            raise WeightsError(f"Weight {self.names['order']!r} names groups that do not exist.")
        lines = torch.arange(rows.start, rows.stop) // self._block[0]
        if stored.numbers.startswith("uint"):
            middle: Tensor | float = 2.0 ** (self._bits - 1)
            if "zero" in self.names:
                middle = self._zeros()[lines][:, places].float()
            numbers = numbers - middle
        values = numbers * scale[lines][:, places]
        return (values * self._whole_scale() if "whole" in self.names else values).to(device)

    def _rows_in_tensor(self, rows: slice) -> slice:
        offset = self.place.first_row(self.rows)
        return slice(rows.start + offset, rows.stop + offset)

    def _read(self, kind: str, *index: slice) -> Tensor:
        name = self.names[kind]
        shape = self.source.shape(name)
        lead = () if self.place.index is None else (self.place.index,)
        rest = tuple(slice(0, size) for size in shape[len(lead) + len(index) :])
        return self.source.read(name, (*lead, *index, *rest))

    def _number(self, kind: str) -> Tensor:
        value = self._read(kind).float().reshape(())
        self._check_positive(value, kind)
        return value

    def _whole_scale(self) -> Tensor:
        value = self._number("whole")
        return value if self.stored.layout == "modelopt" else 1 / value

    def _check_positive(self, scale: Tensor, kind: str) -> None:
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise WeightsError(
                f"Weight {self.names[kind]!r} in {self.source.where} holds a scale that is NaN, "
                "infinite or negative."
            )

    def _scale(self) -> Tensor:
        """[grid rows, grid columns] float32, of the whole tensor."""
        scale = self._read("scale").float()
        self._check_positive(scale, "scale")
        if self.stored.layout in ("gptq", "awq"):
            scale = scale.t()
        return scale.reshape(-(-self.place.all_rows(self.rows) // self._block[0]), -1)

    def _zeros(self) -> Tensor:
        """[grid rows, grid columns] uint8."""
        stored, words = self.stored, self._read("zero")
        if stored.layout == "awq":
            return self._from_words(words).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).t()
        if stored.layout == "gptq":
            # The first version stores one less, in so many bits.
            zeros = self._from_words(words).t()
            return zeros if stored.version == "gptq_v2" else zeros + 1
        if words.dtype == torch.int32:  # packed along the rows
            return self._from_words(words.t())[:, : self.place.all_rows(self.rows)].t()
        return (words + 2 ** (self._bits - 1)).to(torch.uint8)

    def _check_middle(self, zero: Tensor) -> None:
        if not bool((zero == 2 ** (self._bits - 1)).all()):
            raise WeightsError(
                f"Weight {self.names['zero']!r} in {self.source.where} holds zero points, but the "
                "configuration says that the weights are symmetric."
            )

    def _on_grid(self, table: Tensor, rows: slice, columns: slice, format: WeightFormat) -> Tensor:
        """What the checkpoint's blocks have, for the format's blocks of a rectangle."""
        block = self._block
        grid = format.grid(rows.stop - rows.start, columns.stop - columns.start)
        row = (torch.arange(grid[0]) * format.rows + rows.start) // block[0]
        column = (torch.arange(grid[1]) * (format.columns or 1) + columns.start) // block[1]
        return table[row][:, column]

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        """[rows, columns], one code an element."""
        stored, bits = self.stored, self._bits
        if bits == 8 and stored.numbers != "uint8":
            return self._read("codes", rows, columns)
        if stored.numbers == "float4_e2m1":
            packed = self._read("codes", rows, _covering(columns, 2))
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
            return codes[:, _within(columns, 2)]
        per_word = 32 // bits
        if stored.layout == "gptq":
            words = self._read("codes", _covering(columns, per_word), rows)
            return self._from_words(words.t())[:, _within(columns, per_word)]
        if stored.layout == "awq":
            words = self._read("codes", columns, _covering(rows, per_word))
            codes = self._from_words(words).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
            return codes[:, _within(rows, per_word)].t()
        words = self._read("codes", rows, _covering(columns, per_word))
        return self._from_words(words)[:, _within(columns, per_word)]

    def _from_words(self, words: Tensor) -> Tensor:
        """int32 [..., words] -> uint8 [..., codes], the lowest bits first."""
        bits = self._bits
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return (words[..., None] >> shifts & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _covering(some: slice, size: int) -> slice:
    """The words of `size` codes each that hold some codes."""
    return slice(some.start // size, -(-some.stop // size))


def _within(some: slice, size: int) -> slice:
    """Some codes, counted in the words that hold them."""
    start = some.start % size
    return slice(start, start + some.stop - some.start)
