"""config.json as it was written, by any version of transformers since 4.40."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.config import resolve_dtype
from megatron_hybrid.models.families.model_settings import ModelSettings
from megatron_hybrid.models.families.rope_settings import rope_of
from megatron_hybrid.models.families.text_configs import TEXT_CONFIGS

MAMBA2_LAYERS = {"mamba": "M", "linear_attention": "M"}
# Classes of models without a head for the next token, or that look at tokens to come.
_NOT_GENERATIVE = re.compile(
    r"Bidirectional|ColBERT|For(?!CausalLM|ConditionalGeneration)[A-Z]\w*$|(?<!LMHead)Model$"
)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(), object_hook=_special_float)
    except ValueError as error:  # JSON's, or UTF-8's
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} holds no JSON object.")
    return values


@dataclass(frozen=True)
class RawConfig(ModelSettings):
    """The values of config.json, and of generation_config.json."""

    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> RawConfig:
        """Raises ConfigurationError for a folder without one that can be read."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigurationError(f"{folder} is not a model folder: it has no config.json.")
        generation = folder / "generation_config.json"
        return cls(_read(path), str(path), _read(generation) if generation.is_file() else {})

    def refuse_other_heads(self) -> None:
        """Raise ConfigurationError for a model that is trained for something else than the next
        token: embeddings, retrieval, masked tokens, classes."""
        for name in self.listed("architectures", default=[]):
            if _NOT_GENERATIVE.search(str(name)):
                raise ConfigurationError(
                    f"{self.where} is a {name}'s, which does not predict next tokens; only models "
                    "for causal language modelling are supported."
                )

    def text_part(self) -> RawConfig:
        """The configuration of the text part inside this one; itself where it has none. What it
        does not say, this one does."""
        inner = self.get(*TEXT_CONFIGS)
        if inner is None:
            return self
        if not isinstance(inner, Mapping):
            raise ConfigurationError(f"The text_config in {self.where} is no object.")
        said = {key: value for key, value in inner.items() if value is not None}
        return RawConfig({**self.values, **said}, self.where, self.generation)

    @property
    def model_type(self) -> str:
        """The family's name."""
        return str(self.values.get("model_type", "unknown"))

    @property
    def dtype(self) -> torch.dtype:
        """The type that weights were saved in."""
        return resolve_dtype(self.get("dtype", "torch_dtype", default="float32"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end tokens; generation_config.json often names more than config.json."""
        found: list[int] = []
        for source in (self.values, self.generation):
            value = source.get("eos_token_id")
            found += [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in found):
            raise self._wrong(("eos_token_id",), found, "a token id, or a list of them")
        return tuple(dict.fromkeys(found))

    def attention(
        self, head_dim: int | None = None, *, bias: bool | None = None, qk_norm: bool = False
    ) -> AttentionConfig:
        """Attention by the usual names, with logits divided by sqrt(head_dim). `head_dim`, `bias`:
        None: as config.json says."""
        heads = self.whole("num_attention_heads")
        if head_dim is None:
            head_dim = self.whole("head_dim", default=self.whole("hidden_size") // heads)
        if bias is None:
            bias = self.flag("attention_bias")
        return AttentionConfig(
            heads,
            self.whole("num_key_value_heads", default=heads),
            head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
        )

    def head_sizes(self, kind: str, usual: tuple[int, int, int]) -> tuple[int, int, int]:
        """Heads, KV heads and head_dim of a kind of layers, whose names have `kind` in front, or
        what is usual. Raises ConfigurationError where heads do not share KV heads evenly."""
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads, kv_heads, dim = (
            self.whole(kind + name, default=default)
            for name, default in zip(names, usual, strict=True)
        )
        if heads % kv_heads:
            raise ConfigurationError(
                f"{kind}num_attention_heads in {self.where} is {heads}, which is no multiple of "
                f"{kind}num_key_value_heads, {kv_heads}."
            )
        return heads, kv_heads, dim

    def gated_mlp(self, size: str = "intermediate_size", *, bias: bool = False) -> MLPConfig:
        """An MLP of silu with a gate; `size`: the name of its size."""
        return MLPConfig(self.whole(size), gated=True, activation="silu", bias=bias)

    def layer_letters(
        self,
        recurrent: Mapping[str, str] = MAMBA2_LAYERS,
        lists: tuple[str, ...] = ("layers_block_type", "layer_types"),
    ) -> str | None:
        """A letter for each Hugging Face layer, from whichever list is there. `recurrent`: the
        family's own kinds of layers, and their letters."""
        names = {"attention": "*", "full_attention": "*", "mlp": "-", "moe": "E", **recurrent}
        if self.get(*lists) is None:
            return None
        layers = self.listed(*lists)
        unknown = [layer for layer in layers if layer not in names]
        if unknown:
            raise ConfigurationError(
                f"Layers of type {unknown[0]!r} in {self.where} are not supported."
            )
        if "layer_types" in lists:
            self.check_count(next(one for one in lists if self.get(one) is not None), layers)
        return "".join(names[layer] for layer in layers)

    def check_count(self, name: str, layers: Sequence[str]) -> None:
        """Raise ConfigurationError where the list of that name has not the model's layers."""
        count = self.get("num_hidden_layers", default=len(layers))
        if count != len(layers):
            raise ConfigurationError(
                f"{name} in {self.where} has {len(layers)} layers, num_hidden_layers is {count}."
            )

    def time_step_limit(self) -> tuple[float, float]:
        """The least and the greatest step size of Mamba2."""
        limit = self.get("time_step_limit", "mamba_dt_limit", default=(0.0, float("inf")))
        if not isinstance(limit, list | tuple) or len(limit) != 2:
            raise ConfigurationError(
                f"time_step_limit in {self.where} is {limit}; it must be two numbers, the least "
                "and the greatest step."
            )
        return float(limit[0]), float(limit[1])

    def rope(
        self,
        head_dim: int,
        partial_rotary_factor: float | None = None,
        theta: float = 10000.0,
        layers: str | None = None,
    ) -> RopeConfig:
        """New style (rope_parameters) or old (rope_theta and rope_scaling): see rope_of. `layers`:
        a type of them that has parameters of its own."""
        given = self.get("rope_parameters", "rope_scaling", default={})
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"The rope_parameters in {self.where} are no object.")
        if layers is not None and given.get(layers) is None:
            raise ConfigurationError(
                f"rope_parameters in {self.where} say nothing of layers of kind {layers!r}."
            )
        given = given if layers is None else given[layers]
        kinds = [name for name, value in given.items() if isinstance(value, Mapping)]
        if kinds and "rope_type" not in given:
            raise ConfigurationError(
                f"The rope_parameters in {self.where} are those of kinds of layers "
                f"({', '.join(kinds)}), and must be the same for all of them."
            )
        names = ("model_type", "rope_theta", "partial_rotary_factor")
        old = {name: self.get(name) for name in names}
        new = {name: value for name, value in given.items() if value is not None}
        return rope_of(replace(self, values={**old, **new}), head_dim, partial_rotary_factor, theta)

    def common(self, *, max_positions: int = 4096, tied: bool = False) -> dict[str, Any]:
        """The fields of HybridModelConfig that every family has under the same names; the arguments
        are the family's defaults."""
        return {
            "model_type": self.model_type,
            "vocab_size": self.whole("vocab_size"),
            "hidden_size": self.whole("hidden_size"),
            "max_position_embeddings": self.whole("max_position_embeddings", default=max_positions),
            "dtype": self.dtype,
            "tie_word_embeddings": self.flag("tie_word_embeddings", default=tied),
            "eos_token_ids": self.eos_token_ids,
            "bos_token_id": self.get("bos_token_id"),
        }


def _special_float(values: dict[str, Any]) -> Any:
    """transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return float(values["__float__"]) if set(values) == {"__float__"} else values
