"""Adapters into the slots of a model: this rank's rows and columns of each, by the names that the
model's family has for its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.layers.adapters import AdaptedPart, AdapterSlots
from megatron_hybrid.layers.linear import LinearPart
from megatron_hybrid.models.adapters.peft_adapter import LowRank, PeftAdapter
from megatron_hybrid.models.checkpoints.placing import refusal, refuse_together
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel


def load_adapter(
    model: HybridModel,
    slot: int | None,
    source: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any] | None,
) -> str:
    """Put an adapter into a slot of the model's, where its graphs read it; the digest of its
    weights. None: this rank has no room, so that no rank may load it.

    `source`: a folder that PEFT saved; or tensors by PEFT's names, whole ones on every rank, and in
    `config` what adapter_config.json would say. All ranks call it. Raises WeightsError, before
    anything is changed, for one that does not fit, on every rank if one refuses.
    """
    slots, lockstep = model.adapters, model.parallel.lockstep
    assert slots is not None
    refused: WeightsError | None = None
    placed: list[_Placed] = []
    used: set[str] = set()
    adapter: PeftAdapter | None = None
    try:
        if slot is None:
            raise WeightsError("There is no room for another adapter.")
        if isinstance(source, str | Path):
            adapter = PeftAdapter.from_folder(source)
        else:
            adapter = PeftAdapter.from_tensors(source, config)
        placed = list(_place(model, adapter, slots))
        used = {one.low_rank.module for one in placed}
    except Exception as error:  # of whatever gives the tensors, too
        refused = refusal(error)
    refuse_together(lockstep, refused)
    assert adapter is not None and slot is not None
    found = lockstep.gather_objects((used, adapter.digest))
    try:
        _check_together(model, slots, adapter, found)
    except WeightsError as error:
        refused = error
    refuse_together(lockstep, refused)
    slots.clear(slot)
    for one in placed:
        a, b = slots.place(one.part, slot, one.use)
        rank = len(one.a)
        a[:rank].copy_(one.a)
        b[:, :rank].copy_(one.b.float() * one.scale)
    settle(model)
    return adapter.digest


def settle(model: HybridModel) -> None:
    """Adapters are where steps read them, once the weights' memory is there."""
    if model.adapters is not None and (model.arena is None or not model.arena.is_released):
        model.adapters.settle()


class _Placed(NamedTuple):
    """What an adapter adds to a part of the model."""

    part: LinearPart
    use: int
    low_rank: LowRank
    a: Tensor  # [rank, this rank's inputs]
    b: Tensor  # [this rank's rows, rank]
    scale: float


def _place(model: HybridModel, adapter: PeftAdapter, slots: AdapterSlots) -> Iterator[_Placed]:
    """Raises WeightsError for a shape that does not fit, and for too large a rank."""
    family, config = family_of(model.config.model_type), model.config
    by_name: dict[str, list[tuple[str, LowRank]]] = {}
    for low_rank in adapter.low_ranks:
        for key in _parameters(low_rank.module, adapter.config):
            by_name.setdefault(family.canonical(key), []).append((key, low_rank))
    for one in slots.parts:
        places = family.places(config, one.block, one.part.role)
        for number, place in enumerate(places):
            found = _fitting(adapter, by_name.get(place.name, []), one, place)
            if found is None:
                continue
            key, low_rank, a, b = found
            rank = len(a)
            if rank > slots.rank:
                raise WeightsError(
                    f"Module {low_rank.module!r} in {adapter.where} has rank {rank}; "
                    f"--max-lora-rank is {slots.rank}."
                )
            key = key.removesuffix(".weight")
            adapter.check_rank(low_rank, key, rank)
            scale = adapter.scale(key, rank) * one.part.multiplier
            yield _Placed(one.part, number if one.uses > 1 else 0, low_rank, a, b, scale)
            if one.uses == 1:
                break


_STACKED = ("gate_up_proj", "up_proj", "down_proj")


def _parameters(module: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Names of the weights that a module of PEFT's may adapt: a layer's weight, or stacked experts,
    of which one that is adapted twice has "base_layer" in its name."""
    yield f"{module}.weight"
    inner = module
    while inner.endswith(".base_layer"):
        inner = inner.removesuffix(".base_layer")
    if inner.endswith("experts"):
        said = {name.rsplit(".", 1)[-1] for name in config.get("target_parameters") or _STACKED}
        yield from (f"{inner}.{name}" for name in _STACKED if name in said)


def _fitting(
    adapter: PeftAdapter, found: list[tuple[str, LowRank]], one: AdaptedPart, place: Location
) -> tuple[str, LowRank, Tensor, Tensor] | None:
    """Of what may be a weight's the one with its shape, and this rank's part of that. None: there
    is none; what may be of several stacked weights need not be of this one."""
    rows, columns = one.part.shape
    outputs, experts, index = place.all_rows(rows), place.stacked, place.index
    if found and index is not None and outputs == columns and adapter.swaps_experts is None:
        raise WeightsError(
            f"Module {found[0][1].module!r} in {adapter.where} is of square experts, which PEFT "
            "writes in two ways: the configuration has to say its peft_version."
        )
    swaps = index is not None and bool(adapter.swaps_experts)
    shape = (columns, outputs) if swaps else (outputs, columns)
    fitting = [(key, own) for key, own in found if _fits(own, *shape, experts)]
    if found and not fitting and index is None:
        key, own = found[0]
        raise WeightsError(
            f"Module {own.module!r} in {adapter.where} has lora_A {list(own.a.shape)} and lora_B "
            f"{list(own.b.shape)}; the model's {key!r} is {[outputs, columns]}."
        )
    if len(fitting) > 1:
        names = " and ".join(repr(own.module) for _, own in fitting)
        raise WeightsError(
            f"{names} in {adapter.where} may both be of {place.name!r}: by their shapes they "
            "cannot be told apart."
        )
    if not fitting:
        return None
    key, own = fitting[0]
    a, b = own.a, own.b
    if index is not None:
        a = a.unflatten(0, (experts, -1))[index]
        b = b.unflatten(1, (-1, experts))[:, :, index]
    if swaps:
        a, b = b.t(), a.t()
    first = place.first_row(rows)
    own_rows, own_columns = one.part.source
    return key, own, a[:, own_columns], b[first + own_rows.start : first + own_rows.stop]


def _fits(own: LowRank, outputs: int, columns: int, experts: int) -> bool:
    """Whether B A is of this shape, or those of so many stacked experts are."""
    rank = len(own.a)
    return own.a.shape[1] == columns and own.b.shape == (outputs, rank) and rank % experts == 0


def _check_together(
    model: HybridModel,
    slots: AdapterSlots,
    adapter: PeftAdapter,
    found: list[tuple[set[str], str]],
) -> None:
    """`found`: of all ranks, the modules that have a place there, and the digests."""
    if len({digest for _, digest in found}) > 1:
        raise WeightsError("The ranks were given different adapters.")
    everywhere = set[str]().union(*(used for used, _ in found))
    for low_rank in adapter.low_ranks:
        if low_rank.module not in everywhere:
            raise WeightsError(
                f"Module {low_rank.module!r} in {adapter.where} "
                f"{_no_place(model, slots, low_rank)}."
            )


def _no_place(model: HybridModel, slots: AdapterSlots, low_rank: LowRank) -> str:
    """Why a module has none."""
    last = low_rank.module.rsplit(".", 1)[-1]
    if last in ("lm_head", "embed_tokens", "embeddings"):
        return "is of the vocabulary: adapters of embeddings and heads are not supported"
    if ".experts" in low_rank.module:
        if not any(".experts." in one.part.role for one in slots.parts):
            return "is of experts, whose adapters need --lora-experts"
        return "has other shapes than the model's experts"
    return (
        f"is no linear layer that may have an adapter in a {model.config.model_type} model of this "
        "configuration: those of attention, MLPs and recurrent layers may, routers and gates not"
    )
