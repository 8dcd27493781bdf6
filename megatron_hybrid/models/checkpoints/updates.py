"""New weights for a model that runs, where its weights are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property
from pathlib import Path

from torch import Tensor

from megatron_hybrid.errors import WeightsError, WeightsLostError
from megatron_hybrid.layers.parts import Part
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.megatron_source import (
    MegatronSource,
    SentMegatronTensors,
    are_megatrons,
)
from megatron_hybrid.models.checkpoints.placing import (
    Placed,
    check_placed,
    check_values,
    open_weights,
    place_parts,
    put_all,
    put_one,
    refusal,
    refuse_together,
)
from megatron_hybrid.models.checkpoints.sent_tensors import GivenTensors, SentTensors
from megatron_hybrid.models.checkpoints.weight_source import TensorSource, WeightSource
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel

# A folder; or tensors in memory by name; or such as are to come.
WeightsSource = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | SentTensors


class ModelUpdates:
    """New weights for one model, whose memory stays where it is. A large model's come in many
    pieces: what they have to fit is looked up once."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model

    def update(self, source: WeightsSource) -> frozenset[str]:
        """Overwrite the model's weights where they are: CUDA graphs go on reading them there.
        Returns which of this rank's were not among them.

        `source`: a Hugging Face folder or a Megatron checkpoint, which has to hold every weight,
        with the same configuration where it holds one; or tensors, whole ones on every rank, by
        Hugging Face's names or those of Megatron's checkpoints, of which some may be left out: in
        memory, or SentTensors that are put in place as they come. All ranks call it. Raises
        WeightsError, before anything is changed, for weights that do not fit, on every rank if one
        refuses; WeightsLostError when they could be copied only in part.
        """
        model, lockstep = self._model, self._model.parallel.lockstep
        with ExitStack() as stack:
            refused: WeightsError | None = None
            opened: WeightSource
            placed: list[Placed] = []
            sent: SentTensors | None = None
            try:
                if isinstance(source, str | Path):
                    folder = ModelFolder.open(source)
                    opened = stack.enter_context(open_weights(folder, model.config))
                    _check_same_model(model.config, folder)
                else:
                    sent = source if isinstance(source, SentTensors) else GivenTensors(source)
                    opened = _source_of(sent, model.config)
                placed = place_parts(self._looked_for(opened), opened, some=sent is not None)
                if model.arena is not None and model.arena.is_released:
                    words = "The weights' memory is given back: wake the weights up first."
                    raise WeightsError(words)
            except Exception as error:  # of whatever gives the tensors: nothing has been changed
                refused = refusal(error)
            comes = sent is not None and not sent.is_there
            try:
                refuse_together(lockstep, refused)
                check_placed(model, placed, opened, reads=not comes)
            except WeightsError:
                if sent is not None:
                    sent.refuse()
                raise
            lost: Exception | None = None
            try:
                if sent is not None and comes:
                    _put_arriving(placed, opened, sent)
                else:
                    put_all(placed, opened)
                model.after_loading()
            except Exception as error:
                lost = error
            if not lockstep.minimum(int(lost is None)):
                reason = "on another rank" if lost is None else f"{type(lost).__name__}: {lost}"
                raise WeightsLostError(
                    f"The new weights were copied only in part ({reason}): the model is a mixture "
                    "of old and new ones. The engine must be restarted."
                ) from lost
        return self._names - {_name(one.block, one.part) for one in placed}

    @cached_property
    def _parts(self) -> list[tuple[int | None, Part]]:
        return list(self._model.weight_parts())

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(_name(*one) for one in self._parts)

    @cached_property
    def _from_tensor(self) -> dict[str, list[int]]:
        """By Hugging Face's names of tensors, the numbers of the parts that may be from each."""
        config, found = self._model.config, dict[str, list[int]]()
        family = family_of(config.model_type)
        for number, (block, part) in enumerate(self._parts):
            for place in family.places(config, block, part.role):
                found.setdefault(place.name, []).append(number)
        return found

    def _looked_for(self, source: WeightSource) -> list[tuple[int | None, Part]]:
        """The parts that may be in a source: of tensors, which need not be all, those that are from
        one of them."""
        if not isinstance(source, TensorSource):
            return self._parts
        found = {number for name in source.names for number in self._from_tensor.get(name, ())}
        return [self._parts[number] for number in sorted(found)]


def _name(block: int | None, part: Part) -> str:
    return f"{part.role} of block {block}"


def _source_of(sent: SentTensors, config: HybridModelConfig) -> WeightSource:
    """By whose names they are is told by these."""
    if are_megatrons(sent.infos):
        return MegatronSource(SentMegatronTensors(sent), config, some=True)
    return TensorSource(config, sent)


def _put_arriving(placed: list[Placed], source: WeightSource, sent: SentTensors) -> None:
    """Put each part in place once all that it is from is there."""
    needs = [set().union(*map(source.tensors_of, one.names)) for one in placed]
    users: dict[str, list[int]] = {}
    for number, names in enumerate(needs):
        for name in names:
            users.setdefault(name, []).append(number)
    missing = [len(names) for names in needs]
    waiting = {name: len(numbers) for name, numbers in users.items()}
    for name in sent.arrivals():
        for number in users.get(name, ()):
            missing[number] -= 1
            if missing[number]:
                continue
            check_values(source, placed[number])
            put_one(source, placed[number])
            for used in needs[number]:
                waiting[used] -= 1
                if not waiting[used] and used != name:
                    sent.drop(used)
        if waiting.get(name):
            sent.keep(name)
        else:
            sent.drop(name)


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
