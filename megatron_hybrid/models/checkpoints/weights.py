"""Weights straight into place, only this rank's slices: from a Hugging Face folder of safetensors
or a Megatron checkpoint when the model is made, and new ones later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_hybrid.errors import ConfigurationError, WeightsError, WeightsLostError
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.layers.parts import WeightPart
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.kv_scales import read_kv_scales
from megatron_hybrid.models.checkpoints.weight_source import (
    Tensors,
    TensorSource,
    WeightSource,
    open_folder,
)
from megatron_hybrid.models.config import HybridModelConfig, resolve_dtype
from megatron_hybrid.models.families.family import Location
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
) -> HybridModel:
    """The model of a Hugging Face folder or a Megatron checkpoint, with this rank's weights on
    `device`.

    `dtype` None or "auto": the checkpoint's. `conv_states_dtype`, `kv_dtype` None: the model's; in
    FP8 keys and values have the checkpoint's scales where it has some, else 1. `load_format`
    "dummy" draws random weights from `seed`, the same for any number of ranks, and needs only
    config.json. `mtp`: with its head for multi-token prediction. Raises ConfigurationError for
    what is not supported, before any weight is read, and WeightsError, naming the weight, for a
    checkpoint that does not fit its configuration.
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
            refused = _refusal(error)
        _refuse_together(parallel.lockstep, refused)
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


def _refusal(error: Exception) -> WeightsError:
    """What went wrong before anything was changed."""
    if isinstance(error, WeightsError):
        return error
    if isinstance(error, ConfigurationError | OSError):
        return WeightsError(str(error))
    refused = WeightsError(f"{type(error).__name__}: {error}")
    refused.__cause__ = error
    return refused


def _refuse_together(ranks: RankGroup, refused: WeightsError | None) -> None:
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

    part: WeightPart
    place: Location
    copies: list[Location]


def _place(model: HybridModel, source: WeightSource, *, some: bool = False) -> list[_Placed]:
    """Where each of this rank's parts is. Raises WeightsError for a weight that has the wrong
    shape, or is missing, unless `some` are enough. Reads no weight."""
    placed = []
    for block, part in model.weight_parts():
        places = source.places(block, part.role)
        stored = [place for place in places if place.name in source.names]
        for place in stored:
            source.check_shape(place, part.shape)
        if stored:
            placed.append(_Placed(part, stored[0], stored[1:]))
        elif not some:
            raise WeightsError(f"Weight {places[0].name!r} is missing in {source.where}.")
    return sorted(placed, key=lambda one: source.file_of(one.place.name))


def _check(model: HybridModel, placed: list[_Placed], source: WeightSource) -> None:
    """Raise WeightsError, on every rank, for a weight that has no place on any rank, or that is
    stored twice with different values."""
    lockstep = model.parallel.lockstep
    own = {place.name for one in placed for place in (one.place, *one.copies)}
    everywhere = set[str]().union(*lockstep.gather_objects(own))
    refused: WeightsError | None = None
    try:
        source.check_all_used(everywhere)
        source.check_rotary_tables()
        for part, place, copies in placed:
            for copy in copies:
                source.check_same(place, copy, partial(_loaded, source, part))
    except Exception as error:  # of tensors in memory each rank has its own
        refused = _refusal(error)
    _refuse_together(lockstep, refused)


def _loaded(source: WeightSource, part: WeightPart, place: Location) -> Tensor:
    """A part's values in one of its places, in the type that the model has them in."""
    return source.read(place.name, _slices(part, place)).to(part.target.dtype)


@torch.no_grad()
def _put(placed: list[_Placed], source: WeightSource, progress: bool = False) -> None:
    for part, place, _ in tqdm(placed, desc="loading weights", unit="part", disable=not progress):
        if part.target.numel():  # the last ranks may have nothing of a small vocabulary
            part.put(source.read(place.name, _slices(part, place)))


def _slices(part: WeightPart, place: Location) -> tuple[slice | int, ...]:
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


def _random(part: WeightPart, seed: int) -> Tensor:
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
