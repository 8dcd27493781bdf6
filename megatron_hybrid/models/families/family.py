"""What a model family says about itself: how to read its configuration, and its weights' names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatron_hybrid.models.config import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    SLIDING_ATTENTION,
    HybridModelConfig,
)
from megatron_hybrid.models.families.raw_config import RawConfig

# Where gates and up projections are one tensor: (which part of how many).
GATED = {"gate_proj": (0, 2), "up_proj": (1, 2), "down_proj": (0, 1)}
# Frequencies that old checkpoints hold: see check_rotary_tables.
ROTARY_TABLE = r"rotary_emb\.inv_freq$"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a weight is in a checkpoint: tensor `name`, there row `index` of `stacked` if several
    experts are stacked, there the `part`-th of `parts` equal pieces if several are concatenated;
    or, if the pieces differ, its rows from `first` on of `total`. `transposed`: [columns, rows]
    there, and the pieces side by side. `interleaved`: the pieces' rows take turns. `padded`: so
    many rows may be there instead, of which the others mean nothing. `scale`: the tensor that may
    have one scale for all of it, if it is in FP8."""

    name: str
    index: int | None = None
    stacked: int = 1
    part: int = 0
    parts: int = 1
    first: int = 0
    total: int | None = None
    transposed: bool = False
    interleaved: bool = False
    padded: int | None = None
    scale: str | None = None

    def first_row(self, rows: int) -> int:
        """Where a weight of so many rows begins there."""
        return self.part * rows if self.total is None else self.first

    def all_rows(self, rows: int) -> int:
        """How many rows the tensor has, that a weight of so many is a part of."""
        return rows * self.parts if self.total is None else self.total


class Family(ABC):
    """Stateless; one instance serves all models of its types."""

    model_types: ClassVar[tuple[str, ...]]
    # (pattern, replacement): other spellings of the same names, applied to a checkpoint's names.
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Tensors in a checkpoint that inference has no use for: they must not change any token.
    ignored: ClassVar[tuple[str, ...]] = (ROTARY_TABLE,)
    # The usual names of a layer's own roles, where a checkpoint's differ: (pattern, replacement).
    roles: ClassVar[tuple[tuple[str, str], ...]] = ()
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    lm_head: ClassVar[str] = "lm_head.weight"
    layers: ClassVar[str] = "model.layers"

    @abstractmethod
    def config(self, raw: RawConfig) -> HybridModelConfig:
        """The model that config.json describes. Raises ConfigurationError for an option that is not
        supported."""

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        """What `locate` gives, or where a weight outside of blocks may be: embedding, final_norm
        (of a layer norm also final_norm.bias) or lm_head."""
        if block is not None:
            return self.locate(config, block, role)
        role, _, inner = role.partition(".")
        name = str(getattr(self, role))
        names = [name.removesuffix("weight") + inner if inner else name]
        if config.tie_word_embeddings and role == "embedding":
            names.append(self.lm_head)
        padded = None if role == "final_norm" else config.padded_vocab_size
        return [Location(name, padded=padded) for name in names]

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        """Where a block's weight may be, the usual place first; where it is in several of them, it
        has to be the same. `role` is "norm.weight" for the norm before the mixer,
        "post_norm.weight" for the one behind it, else "mixer." and the layer's own name for it.
        Past the model's last block come those of its MTPHead;
        what is in none of them has a role that begins with "mtp.", and the number of the head's
        first or last block."""
        return [Location(self.name_in(f"{self.layers}.{block}", role))]

    def constants(self, config: HybridModelConfig) -> Mapping[str, Tensor]:
        """What the model makes of its configuration, by the names of tensors that a checkpoint may
        have of it, and `ignores` must know: those have to be the same."""
        return {}

    def name_in(self, layer: str, role: str) -> str:
        """The usual name of a role in a layer of one block."""
        inner = f"mixer.{self.name_of(role)}" if role.startswith("mixer.") else role
        return f"{layer}.{inner}"

    def canonical(self, name: str) -> str:
        """A tensor's name in the spelling that `locate` gives."""
        return _renamed(name, self.renames)

    def name_of(self, role: str) -> str:
        """A role inside a mixer, as the checkpoint calls it."""
        return _renamed(role.removeprefix("mixer."), self.roles)

    def ignores(self, config: HybridModelConfig, name: str) -> bool:
        """Whether a tensor that no part of the model is from may be there all the same."""
        return any(re.search(pattern, name) for pattern in self.ignored)


class TwoBlockFamily(Family):
    """Families whose Hugging Face layer is a mixer and an MLP, each with its norm and residual:
    layer i becomes the blocks 2i and 2i + 1."""

    first_norm: ClassVar[str] = "input_layernorm"
    second_norm: ClassVar[str] = "post_attention_layernorm"
    # Of blocks whose BlockForm has them.
    first_post_norm: ClassVar[str] = "post_attention_layernorm"
    second_post_norm: ClassVar[str] = "post_feedforward_layernorm"
    attention: ClassVar[str] = "self_attn"
    recurrent: ClassVar[str] = "mamba"
    mlp: ClassVar[str] = "mlp"

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        return self.locate_in(config, f"model.layers.{block // 2}", block, role)

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        """The same, in this Hugging Face layer."""
        if role == "norm.weight":
            norm = self.second_norm if block % 2 else self.first_norm
            return [Location(f"{layer}.{norm}.weight")]
        if role == "post_norm.weight":
            norm = self.second_post_norm if block % 2 else self.first_post_norm
            return [Location(f"{layer}.{norm}.weight")]
        role = role.removeprefix("mixer.")
        if (letter := config.letter(block)) in (DENSE_MLP, EXPERTS):
            return self.locate_mlp(config, layer, role)
        mixer = self.attention if letter in (ATTENTION, SLIDING_ATTENTION) else self.recurrent
        return [Location(f"{layer}.{mixer}.{self.name_of(role)}")]

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        """A weight of an MLP, or of experts, which are single in the checkpoint or, as transformers
        5 writes them, stacked, and the gates with the up projections."""
        places = [Location(f"{layer}.{self.mlp}.{self.name_of(role)}")]
        expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", role)
        if expert and config.moe is not None:
            part, parts = GATED[expert[2]]
            tensor = "down_proj" if parts == 1 else "gate_up_proj"
            name = f"{layer}.{self.mlp}.experts.{tensor}"
            places.append(Location(name, int(expert[1]), config.moe.num_experts, part, parts))
        return places


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
