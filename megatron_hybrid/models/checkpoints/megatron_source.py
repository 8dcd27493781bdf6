"""Weights by Megatron's names, in a checkpoint or sent by a trainer: our roles as tensors, made of
rows of Megatron's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.megatron_arguments import has_zero_centered_norms
from megatron_hybrid.models.checkpoints.megatron_limits import check_expressible
from megatron_hybrid.models.checkpoints.megatron_names import HEAD, MegatronNames, Role, Rows
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors
from megatron_hybrid.models.checkpoints.weight_source import Index, WeightSource
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Location


class MegatronTensors(Protocol):
    """Tensors by Megatron's names."""

    where: str  # for messages
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """Of the training job, if they are known."""

    def read(self, name: str, index: Index) -> Tensor:
        """A rectangle of one of them."""


class SentMegatronTensors:
    """Those that a trainer sends: as MegatronTensors, once they are there."""

    arguments = None

    def __init__(self, sent: SentTensors) -> None:
        sent.rename(own_name)
        self.where, self._held = sent.where, sent.held
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: info.shape for name, info in sent.infos.items()
        }

    def read(self, name: str, index: Index) -> Tensor:
        """As MegatronTensors."""
        return self._held[name][index]


def own_name(name: str) -> str:
    """A tensor's name without what wrappers of a model put in front of it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def are_megatrons(names: Collection[str]) -> bool:
    """Whether these are names of Megatron's."""
    own = r"decoder\.|embedding\.word_embeddings\.|output_layer\."
    return any(re.match(own, own_name(name)) for name in names)


class MegatronSource(WeightSource):
    """Every role is a tensor of its own here, shaped as the model has it: neither how many ranks
    wrote the checkpoint nor how Megatron lays out its tensors is to be seen. `roles`: by name."""

    def __init__(
        self, stored: MegatronTensors, config: HybridModelConfig, *, some: bool = False
    ) -> None:
        """`some`: not all weights have to be there. Raises ConfigurationError for a model that
        Megatron has no layers for, WeightsError for tensors of another model."""
        super().__init__(config)
        check_expressible(config)
        self.where = stored.where
        self._stored = stored
        centered = has_zero_centered_norms(stored.arguments)
        self._layout = MegatronNames(config, stored.shapes, zero_centered=centered, some=some)
        self.roles: dict[str, Role] = {}
        self._found: dict[tuple[int | None, str], str] = {}
        for role in self._layout.roles():
            if some and not any(rows.name in stored.shapes for rows in role.rows):
                continue
            self._check_role(role)
            name = _name(role)
            self.roles[name] = role
            self._found[role.block, role.role] = name
        if config.tie_word_embeddings and HEAD in stored.shapes:
            # The embedding once more, where a stage of its own: to be compared.
            self.roles[HEAD] = Role(None, "lm_head", [Rows(HEAD, 0, config.vocab_size)])
        self._check_extents()
        used = {rows.name for role in self.roles.values() for rows in role.rows}
        others = {name for name in stored.shapes if not self._layout.ignores(name)} - used
        self.names = {name: name for name in (*self.roles, *sorted(others))}

    # ------------------------------------------------------------------ names

    def places(self, block: int | None, role: str) -> list[Location]:
        """Where a role is; of a tied embedding also the head, where a stage has it once more."""
        name = HEAD if role == "lm_head" else f"block {block}, {role}"
        places = [Location(self._found.get((block, role), name))]
        if self.config.tie_word_embeddings and role == "embedding":
            places.append(Location(HEAD))
        return places

    def ignores(self, name: str) -> bool:
        """A role that this rank does not have is another rank's."""
        return name in self.roles

    def constants(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    # ------------------------------------------------------------------ values

    def file_of(self, name: str) -> str:
        """What shares stored rectangles is to be read together."""
        return self.roles[name].rows[0].name

    def tensors_of(self, name: str) -> Collection[str]:
        return {rows.name for rows in self.roles[name].rows}

    def shape(self, name: str) -> tuple[int, ...]:
        """As the model has it."""
        rows = self.roles[name].rows
        first = self._stored.shapes[rows[0].name][len(rows[0].lead) :]
        return (sum(self._count(one) for one in rows), *first[1:])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32  # or bfloat16: these checkpoints are not quantised

    def read(self, name: str, index: Index) -> Tensor:
        """A rectangle of a role, put together from rows of what is stored."""
        first, *rest = index
        assert isinstance(first, slice)
        start, stop = first.start, first.stop
        pieces, begin = [], 0
        for rows in self.roles[name].rows:
            count = self._count(rows)
            low, high = max(start - begin, 0), min(stop - begin, count)
            if low < high:
                lead = [index for index, _ in rows.lead]
                inside = slice(rows.start + low, rows.start + high)
                values = self._stored.read(rows.name, (*lead, inside, *rest))
                pieces.append(_moved(values, rows.offset))
            begin += count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _count(self, rows: Rows) -> int:
        if rows.count is not None:
            return rows.count
        return self._stored.shapes[rows.name][len(rows.lead)] - rows.start

    # ------------------------------------------------------------------ checks

    def _check_role(self, role: Role) -> None:
        shapes = self._stored.shapes
        for rows in role.rows:
            if rows.name not in shapes:
                raise WeightsError(f"Weight {rows.name!r} is missing in {self.where}.")
            shape, lead = shapes[rows.name], tuple(size for _, size in rows.lead)
            if len(shape) <= len(lead) or shape[: len(lead)] != lead:
                raise WeightsError(
                    f"Weight {rows.name!r} in {self.where} has shape {list(shape)}; the "
                    f"configuration makes it begin with {list(lead)} (layers, experts)."
                )

    def _check_extents(self) -> None:
        """The roles have to use up each tensor, but for the vocabulary's padding."""
        ends: dict[str, tuple[int, int]] = {}  # (rows that are used, dimensions in front of them)
        for role in self.roles.values():
            for rows in role.rows:
                end = rows.start + self._count(rows)
                ends[rows.name] = max((end, len(rows.lead)), ends.get(rows.name, (0, 0)))
        padded = {self._found.get((None, "embedding")), HEAD}
        for name, (end, lead) in ends.items():
            stored = self._stored.shapes[name][lead]
            if stored < end or (stored > end and name not in padded):
                raise WeightsError(
                    f"Weight {name!r} in {self.where} has {stored} rows; the configuration makes "
                    f"it {end}."
                )


def _name(role: Role) -> str:
    if role.block is None:
        return role.rows[0].name
    return f"{role.rows[0].name} ({role.role} of block {role.block})"


def _moved(values: Tensor, offset: float) -> Tensor:
    if not offset:
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32)) + offset
