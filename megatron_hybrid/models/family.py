"""What a model family says about itself: how to read its configuration, and its weights' names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from megatron_hybrid.models.config import ATTENTION, MAMBA, HybridModelConfig
from megatron_hybrid.models.raw_config import RawConfig


@dataclass(frozen=True, slots=True)
class Location:
    """Where a weight is in a checkpoint: tensor `name`, there row `index` of `stacked` if several
    experts are stacked, there the `part`-th of `parts` equal pieces if several are concatenated."""

    name: str
    index: int | None = None
    stacked: int = 1
    part: int = 0
    parts: int = 1


class Family(ABC):
    """Stateless; one instance serves all models of its types."""

    model_types: ClassVar[tuple[str, ...]]
    # (pattern, replacement): other spellings of the same names, applied to a checkpoint's names.
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Tensors in a checkpoint that inference has no use for.
    ignored: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    lm_head: ClassVar[str] = "lm_head.weight"

    @abstractmethod
    def config(self, raw: RawConfig) -> HybridModelConfig:
        """Raises ConfigurationError for an option that is not supported."""

    @abstractmethod
    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        """Where a block's weight may be, the usual place first. `role` is "norm.weight" for the
        norm before the mixer, else "mixer." and the layer's own name for it."""

    def canonical(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, config: HybridModelConfig, name: str) -> bool:
        if config.tie_word_embeddings and name == self.lm_head:
            return True
        return any(re.search(pattern, name) for pattern in self.ignored)


class TwoBlockFamily(Family):
    """Families whose Hugging Face layer is a mixer and an MLP, each with its norm and residual:
    layer i becomes the blocks 2i and 2i + 1."""

    second_norm: ClassVar[str] = "post_attention_layernorm"
    mlp: ClassVar[str] = "mlp"

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer = f"model.layers.{block // 2}"
        if role == "norm.weight":
            norm = self.second_norm if block % 2 else "input_layernorm"
            return [Location(f"{layer}.{norm}.weight")]
        role = role.removeprefix("mixer.")
        letter = config.pattern[block]
        if letter == MAMBA:
            return [Location(f"{layer}.mamba.{role}")]
        if letter == ATTENTION:
            return [Location(f"{layer}.self_attn.{role}")]
        return self.locate_mlp(config, layer, role)

    def locate_mlp(self, config: HybridModelConfig, layer: str, role: str) -> list[Location]:
        return [Location(f"{layer}.{self.mlp}.{role}")]
