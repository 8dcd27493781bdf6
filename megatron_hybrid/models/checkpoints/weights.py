"""Weights straight into place, only this rank's slices: from a Hugging Face folder of safetensors
or a Megatron checkpoint when the model is made, and new ones later."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_hybrid.errors import ConfigurationError, WeightsError, WeightsLostError
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.layers.linear import LinearPart
from megatron_hybrid.layers.parts import Part
from megatron_hybrid.models.blocks import ModelFormats
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.kv_scales import read_kv_scales
from megatron_hybrid.models.checkpoints.quantized_weights import (
    StoredWeight,
    stored_format,
    used_place,
    weight_format,
)
from megatron_hybrid.models.checkpoints.to_device import on_lanes
from megatron_hybrid.models.checkpoints.weight_source import (
    Tensors,
    TensorSource,
    WeightSource,
    open_folder,
)
from megatron_hybrid.models.config import HybridModelConfig, resolve_dtype
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, RankGroup


def load_model(
    folder: ModelFolder | str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype | str | None,
    parallel: ParallelContext,
    conv_states_dtype: torch.dtype | None = None,
    ssm_states_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    load_format: str = "auto",
    seed: int = 1234,
    progress: bool = True,
    mtp: bool = False,
    quantization: str | None = None,
    replay_chunk: int | None = None,
) -> HybridModel:
    """The model of a Hugging Face folder or a Megatron checkpoint, with this rank's weights on
    `device`.

    `dtype` None or "auto": the checkpoint's. `conv_states_dtype`, `kv_dtype` None: the model's; in
    FP8 keys and values have the checkpoint's scales where it has some, else 1. `load_format`
    "dummy" draws random weights from `seed`, the same for any number of ranks, and needs only
    config.json. `mtp`: with its head for multi-token prediction. `quantization`: see `formats_of`.
    `replay_chunk`: of HybridModel.
    Raises ConfigurationError for what is not supported, before any weight is read, and
    WeightsError, naming the weight, for a checkpoint that does not fit its configuration.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigurationError(f"--load-format is {load_format!r}; it can be auto or dummy.")
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder.open(folder)
    dtype = resolve_dtype(dtype, folder.config.dtype)
    with torch.device(device):
        model = HybridModel(
            folder.config,
            parallel,
            dtype,
            conv_states_dtype or dtype,
            ssm_states_dtype,
            kv_dtype,
            mtp,
            formats_of(folder, quantization, load_format),
            replay_chunk,
        )
    model.eval()
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        with _open(folder, folder.config) as source:
            placed = _place(model, source)
            _check(model, placed, source)
            _put(placed, source, progress and parallel.is_first)
            if kv_dtype == FP8:
                read_kv_scales(model, source)
    model.after_loading()
    return model


_NOT_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)
# Formats that weights in 16 or 32 bits are rounded to while they are read.
ON_THE_FLY = {
    "fp8": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8_block": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
}
# What stays as it is: the vocabulary's, and what step sizes and gates of recurrences come from.
NEVER_ROUNDED = re.compile(r"lm_head|embedding|mixer\.(in_proj_(a|b|ba)|x_proj|dt_proj)\.weight")


def formats_of(
    folder: ModelFolder, quantization: str | None, load_format: str = "auto"
) -> ModelFormats:
    """How a model keeps its weights: as the folder has them, or, if they are not quantised there,
    as `quantization` says, a key of ON_THE_FLY. Raises ConfigurationError for both at once."""
    said, names = folder.quantization, None
    if quantization is not None and said is not None:
        raise ConfigurationError(
            f"--quantization is {quantization}, but the weights in {folder.path} are quantised "
            f"already ({said.where}); leave the flag out."
        )
    config = folder.config
    if said is not None and load_format == "auto":
        with open_folder(folder, config) as source:
            names = frozenset(source.names)

    def format_of(block: int | None, role: str) -> WeightFormat | None:
        if said is not None:
            places = family_of(config.model_type).places(config, block, role)
            return weight_format(stored_format(said, used_place(places, names).name, names))
        if quantization is None or NEVER_ROUNDED.search(role):
            return None
        return ON_THE_FLY[quantization]

    return format_of


def rounded_weights(model: HybridModel) -> list[Tensor]:
    """The weights [N, K] of dense linear layers that `--quantization` would round, with whatever
    lies in one piece with them: the gates of a delta net."""
    found: dict[int, Tensor] = {}
    for _, part in model.weight_parts():
        if not isinstance(part, LinearPart) or isinstance(part.target, QuantizedWeight):
            continue
        if NEVER_ROUNDED.search(part.role) or ".experts." in part.role:
            continue
        for weight in part.layer.plain_weights():
            found[id(weight)] = weight
    return list(found.values())


def has_mtp_weights(folder: ModelFolder) -> bool:
    """Whether a folder holds the head that the configuration describes: some hold a model without
    it. Raises WeightsError for one without weights."""
    if folder.is_megatron:
        return False  # which are not read
    with open_folder(folder, folder.config) as source:
        (fc,) = source.places(len(folder.config.pattern), "mtp.fc.weight")
        return fc.name in source.names


def update_model(model: HybridModel, source: str | Path | Tensors) -> None:
    """Overwrite the model's weights where they are: CUDA graphs go on reading them there.

    `source`: a Hugging Face folder or a Megatron checkpoint, which has to hold every weight, with
    the same configuration where it holds one; or tensors in memory by Hugging Face's names, whole
    ones on every rank, of which some may be left out. All ranks call it. Raises WeightsError,
    before anything is changed, for weights that do not fit, on every rank if one refuses;
    WeightsLostError when they could be copied only in part.
    """
    parallel = model.parallel
    with ExitStack() as stack:
        refused: WeightsError | None = None
        opened: WeightSource
        placed: list[_Placed] = []
        try:
            if isinstance(source, str | Path):
                folder = ModelFolder.open(source)
                opened = stack.enter_context(_open(folder, model.config))
                _check_same_model(model.config, folder)
            else:
                opened = TensorSource(model.config, source)
            placed = _place(model, opened, some=not isinstance(source, str | Path))
        except Exception as error:  # of whatever gives the tensors: nothing has been changed yet
            refused = refusal(error)
        refuse_together(parallel.lockstep, refused)
        _check(model, placed, opened)
        lost: Exception | None = None
        try:
            _put(placed, opened)
            model.after_loading()
        except Exception as error:
            lost = error
        if not parallel.lockstep.minimum(int(lost is None)):
            reason = "on another rank" if lost is None else f"{type(lost).__name__}: {lost}"
            raise WeightsLostError(
                f"The new weights were copied only in part ({reason}): the model is a mixture of "
                "old and new ones. The engine must be restarted."
            ) from lost


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


@contextmanager
def _open(folder: ModelFolder, config: HybridModelConfig) -> Iterator[WeightSource]:
    """The weights in a folder of either kind."""
    if folder.is_megatron:
        # torch.distributed.checkpoint takes a while to import.
        from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint
        from megatron_hybrid.models.checkpoints.megatron_source import MegatronSource

        yield MegatronSource(MegatronCheckpoint(folder.checkpoint), config)
    else:
        with open_folder(folder, config) as source:
            yield source


class _Placed(NamedTuple):
    """A part of the model, where a source has it, and where it has it once more."""

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
        return {place.name for place in (self.place, *self.copies)}


def _place(model: HybridModel, source: WeightSource, *, some: bool = False) -> list[_Placed]:
    """Where each of this rank's parts is. Raises WeightsError for a weight that has the wrong
    shape, or is missing, unless `some` are enough. Reads no weight."""
    placed = []
    for block, part in model.weight_parts():
        places = source.places(block, part.role)
        if (quantized := _quantized(part, places, source)) is not None:
            quantized.check()
            placed.append(_Placed(part, quantized.place, [], quantized))
            continue
        stored = [place for place in places if place.name in source.names]
        for place in stored:
            source.check_shape(place, part.shape)
        if stored:
            _check_number_type(source, stored[0])
            placed.append(_Placed(part, stored[0], stored[1:], None))
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
    if dtype not in _NOT_QUANTIZED:
        raise WeightsError(
            f"Weight {place.name!r} in {source.where} is {dtype}, but it has no scale, or its "
            "configuration does not say that it is quantised."
        )


def _check(model: HybridModel, placed: list[_Placed], source: WeightSource) -> None:
    """Raise WeightsError, on every rank, for a weight that has no place on any rank, or that is
    stored twice with different values."""
    lockstep = model.parallel.lockstep
    own = set[str]().union(*(one.names for one in placed))
    everywhere = set[str]().union(*lockstep.gather_objects(own))
    refused: WeightsError | None = None
    try:
        source.check_all_used(everywhere)
        source.check_rotary_tables()
        for part, place, copies, quantized in placed:
            for copy in copies:
                source.check_same(place, copy, partial(_loaded, source, part))
            if quantized is not None:
                quantized.check_values()
    except Exception as error:  # of tensors in memory each rank has its own
        refused = refusal(error)
    refuse_together(lockstep, refused)


def _loaded(source: WeightSource, part: Part, place: Location) -> Tensor:
    """A part's values in one of its places, in the type that the model has them in."""
    values = source.read(place.name, _slices(part, place))
    return values.to(part.target.dtype) if isinstance(part.target, Tensor) else values


def _put(placed: list[_Placed], source: WeightSource, progress: bool = False) -> None:
    # the last ranks may have nothing of a small vocabulary
    wanted = [one for one in placed if all(rows.start < rows.stop for rows in one.part.source)]
    put = partial(_put_one, source)
    device = wanted[0].part.target.device if wanted else torch.device("cpu")
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
def _put_one(
    source: WeightSource, one: _Placed, upload: Callable[[Tensor], Tensor] = lambda values: values
) -> None:
    """`upload`: brings what was read to the device."""
    part, quantized = one.part, one.quantized
    target = part.target
    if quantized is None:
        part.put(upload(source.read(one.place.name, _slices(part, one.place))))
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


def _slices(part: Part, place: Location) -> tuple[slice | int, ...]:
    offset = place.part * part.shape[0]
    first = slice(part.source[0].start + offset, part.source[0].stop + offset)
    rest = (first, *part.source[1:])
    return rest if place.index is None else (place.index, *rest)


# What may differ between the checkpoints of one model.
_NOT_THE_MODEL = ("dtype", "eos_token_ids", "bos_token_id", "max_position_embeddings", "mtp")


def _check_same_model(ours: HybridModelConfig, folder: ModelFolder) -> None:
    if folder.described is None:
        return  # weights alone: their names and shapes are checked
    theirs = folder.config
    for field in fields(ours):
        old, new = getattr(ours, field.name), getattr(theirs, field.name)
        if old != new and field.name not in _NOT_THE_MODEL:
            raise WeightsError(
                f"The config.json in {folder.path} describes another model than the one that runs: "
                f"{field.name} is {new}, here {old}."
            )


def _fill_randomly(model: HybridModel, seed: int) -> None:
    """Every rank draws whole weights and keeps its slice."""
    whole: tuple[str, Tensor] | None = None  # parts of one weight follow one another
    for block, part in model.weight_parts():
        name = f"{block}.{part.role}"
        if whole is None or whole[0] != name:
            whole = name, _random(part, seed ^ zlib.crc32(name.encode()))
        part.put(whole[1][part.source])


def _random(part: Part, seed: int) -> Tensor:
    device = part.target.device
    generator = torch.Generator(device).manual_seed(seed)
    name = part.role.rsplit(".", 1)[-1]
    if name in ("A_log", "dt_bias"):
        # A in [1, 16], step sizes around 0.01: what Mamba2 is initialised with.
        uniform = torch.rand(part.shape, generator=generator, device=device)
        return (1 + 15 * uniform).log() if name == "A_log" else uniform * 2 - 5.5
    if len(part.shape) == 1:
        return torch.zeros(part.shape, device=device).add_(0.0 if name == "bias" else 1.0)
    normal = torch.randn(part.shape, generator=generator, device=device)
    return normal.mul_(0.5 / part.shape[-1] ** 0.5)
