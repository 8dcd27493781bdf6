"""Which part of a model is from which tensors of a source, and putting it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.layers.linear import LinearPart
from megatron_hybrid.layers.parts import Part
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.quantized_weights import (
    StoredWeight,
    stored_format,
    used_place,
    weight_format,
)
from megatron_hybrid.models.checkpoints.to_device import on_lanes
from megatron_hybrid.models.checkpoints.weight_source import WeightSource, open_folder
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import RankGroup

_NOT_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def open_weights(folder: ModelFolder, config: HybridModelConfig) -> Iterator[WeightSource]:
    """The weights in a folder of either kind."""
    if folder.is_megatron:
        # torch.distributed.checkpoint takes a while to import.
        from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint
        from megatron_hybrid.models.checkpoints.megatron_source import MegatronSource

        yield MegatronSource(MegatronCheckpoint(folder.checkpoint), config)
    else:
        with open_folder(folder, config) as source:
            yield source


class Placed(NamedTuple):
    """A part of a block, where a source has it, and where it has it once more."""

    block: int | None
    part: Part
    place: Location
    copies: list[Location]
    quantized: StoredWeight | None  # how it is stored there

    @property
    def name(self) -> str:
        """Of the tensor that its values are in."""
        return self.place.name if self.quantized is None else self.quantized.names["codes"]

    @property
    def names(self) -> set[str]:
        """Of the tensors that it is read from."""
        if self.quantized is not None:
            return self.quantized.all_names
        places = (self.place, *self.copies)
        return {name for place in places for name in (place.name, place.scale) if name is not None}


def place_parts(
    parts: Iterable[tuple[int | None, Part]], source: WeightSource, *, some: bool = False
) -> list[Placed]:
    """Where each of these parts, of a block or of none, is. Raises WeightsError for a weight with
    another shape, or that is missing, unless `some` are enough. Reads no weight."""
    placed = []
    for block, part in parts:
        places = source.places(block, part.role)
        if (quantized := _quantized(part, places, source)) is not None:
            quantized.check()
            placed.append(Placed(block, part, quantized.place, [], quantized))
            continue
        stored = [_with_its_scale(source, p) for p in places if p.name in source.names]
        for place in stored:
            source.check_shape(place, part.shape)
        if stored:
            _check_number_type(source, stored[0])
            placed.append(Placed(block, part, stored[0], stored[1:], None))
        elif not some:
            raise WeightsError(f"Weight {places[0].name!r} is missing in {source.where}.")
    return sorted(placed, key=lambda one: source.file_of(one.name))


def _quantized(part: Part, places: list[Location], source: WeightSource) -> StoredWeight | None:
    """A part that its checkpoint says to be quantised. Of what the model keeps in its own type (a
    router, an embedding) only the tensors tell: some configurations name kinds of layers."""
    if source.quantization is None or len(part.shape) != 2:
        return None
    place = used_place(places, source.names)
    stored = stored_format(source.quantization, place.name, source.names)
    if stored is None:
        return None
    found = StoredWeight(source, place, stored, *part.shape)
    needed = {found.names["codes"], found.names["scale"]}
    if isinstance(part, LinearPart) or needed <= source.names.keys():
        return found
    return None


def _check_number_type(source: WeightSource, place: Location) -> None:
    dtype = source.dtype(place.name)
    if dtype not in _NOT_QUANTIZED and place.scale is None:
        raise WeightsError(
            f"Weight {place.name!r} in {source.where} is {dtype}, but it has no scale, or its "
            "configuration does not say that it is quantised."
        )


def check_placed(
    model: HybridModel, placed: list[Placed], source: WeightSource, *, reads: bool = True
) -> None:
    """Raise WeightsError, on every rank, for a weight that has no place on any rank, or that is
    stored twice with different values. `reads`: False where no values are there yet."""
    lockstep = model.parallel.lockstep
    own = set[str]().union(*(one.names for one in placed))
    everywhere = set[str]().union(*lockstep.gather_objects(own))
    refused: WeightsError | None = None
    try:
        source.check_all_used(everywhere)
        if reads:
            source.check_rotary_tables()
            source.check_constants()
            for one in placed:
                check_values(source, one)
    except Exception as error:  # of tensors in memory each rank has its own
        refused = refusal(error)
    refuse_together(lockstep, refused)


def check_values(source: WeightSource, one: Placed) -> None:
    """Raise WeightsError for values that differ where a part is stored twice, and for scales that
    can't be."""
    for copy in one.copies:
        source.check_same(one.place, copy, partial(_loaded, source, one.part))
    if one.quantized is not None:
        one.quantized.check_values()


def _loaded(source: WeightSource, part: Part, place: Location) -> Tensor:
    """A part's values in one of its places, in the type that the model has them in."""
    values = _read(source, part, place)
    return values.to(part.target.dtype) if isinstance(part.target, Tensor) else values


def put_all(placed: list[Placed], source: WeightSource, progress: bool = False) -> None:
    """Put every part in place."""
    # the last ranks may have nothing of a small vocabulary
    wanted = [one for one in placed if all(rows.start < rows.stop for rows in one.part.source)]
    put = partial(put_one, source)
    devices = {one.part.target.device for one in wanted}  # some weights may stay on the host
    device = max(devices, key=lambda one: one.type == "cuda", default=torch.device("cpu"))
    done: Iterable[None]
    if device.type == "cuda" and source.reads_side_by_side:
        done = on_lanes(put, wanted, device)
    else:
        done = map(put, wanted)
    for _ in tqdm(
        done, total=len(wanted), desc="loading weights", unit="part", disable=not progress
    ):
        pass


@torch.no_grad()
def put_one(
    source: WeightSource, one: Placed, upload: Callable[[Tensor], Tensor] = lambda values: values
) -> None:
    """`upload`: brings what was read to the device."""
    part, quantized = one.part, one.quantized
    target = part.target
    if quantized is None:
        values = _read(source, part, one.place)
        part.put(values if target.device.type == "cpu" else upload(values))
        return
    rows, columns = part.source
    if isinstance(target, QuantizedWeight) and _lies_within(target.format, quantized):
        weight = quantized.read(rows, columns, target.format, target.device)
        target.copy_(weight.times(part.multiplier))
    else:
        part.put(quantized.values(rows, columns, target.device))


def _lies_within(format: WeightFormat, quantized: StoredWeight) -> bool:
    """Whether a format's blocks are those of a checkpoint, or parts of them."""
    stored = weight_format(quantized.stored)
    return stored is not None and format == replace(
        stored, rows=format.rows, columns=format.columns
    )


def _read(source: WeightSource, part: Part, place: Location) -> Tensor:
    """A part's rectangle of one of its places."""
    index = _slices(part, place)
    if place.interleaved:
        return source.read(place.name, index)[place.part :: place.parts].contiguous()
    if place.scale is not None:
        values, scale = source.read(place.name, index), _scale(source, place.scale)
        return values.float() * scale.to(values.device)
    if not place.transposed:
        return source.read(place.name, index)
    rows, columns = index[-2:]
    return source.read(place.name, (*index[:-2], columns, rows)).mT.contiguous()


def _with_its_scale(source: WeightSource, place: Location) -> Location:
    """Without one where none is needed."""
    is_scaled = source.dtype(place.name) == torch.float8_e4m3fn and place.scale in source.names
    return place if is_scaled else replace(place, scale=None)


def _scale(source: WeightSource, name: str) -> Tensor:
    """Of a whole tensor. Raises WeightsError for several."""
    shape = source.shape(name)
    if shape not in ((), (1,)):
        raise WeightsError(f"Weight {name!r} has shape {list(shape)}; one scale is supported.")
    return source.read(name, tuple(slice(0, size) for size in shape)).float()


def _slices(part: Part, place: Location) -> tuple[slice | int, ...]:
    rows, offset = part.source[0], place.first_row(part.shape[0])
    first = slice(rows.start + offset, rows.stop + offset)
    if place.interleaved:  # with those of the other pieces
        first = slice(rows.start * place.parts, rows.stop * place.parts)
    rest = (first, *part.source[1:])
    return rest if place.index is None else (place.index, *rest)


def refusal(error: Exception) -> WeightsError:
    """What went wrong before anything was changed."""
    if isinstance(error, WeightsError):
        return error
    if isinstance(error, ConfigurationError | OSError):
        return WeightsError(str(error))
    refused = WeightsError(f"{type(error).__name__}: {error}")
    refused.__cause__ = error
    return refused


def refuse_together(ranks: RankGroup, refused: WeightsError | None) -> None:
    """Raise on every rank if one refuses."""
    if not ranks.minimum(int(refused is None)):
        raise refused or WeightsError("Another rank refuses the weights; its log says why.")
