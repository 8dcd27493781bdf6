"""What a Hugging Face folder says about its quantisation: config.json's quantization_config, and
ModelOpt's older hf_quant_config.json. No tensor is read here, and no torch imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.quantization_methods import (
    Rule,
    Said,
    StoredFormat,
    kv_cache_of,
    method_of,
    modelopt_values,
    rule_of,
)
from megatron_hybrid.models.families.text_configs import TEXT_CONFIGS

__all__ = ["Quantization", "StoredFormat"]


class Quantization:
    """How the weights of a quantised checkpoint are stored. `where`: the file that says so, for
    messages. `kv_cache`: "fp8_e4m3" where the checkpoint has scales for keys and values in FP8."""

    def __init__(self, where: str, kv_cache: str | None, rule: Rule) -> None:
        self.where = where
        self.kv_cache = kv_cache
        self._rule = rule
        self._formats: dict[str, StoredFormat | None] = {}

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        where: str,
        hf_quant_config: Mapping[str, Any] | None = None,
    ) -> Quantization | None:
        """From what config.json holds, `where` it is, and what hf_quant_config.json beside it
        holds; None for a checkpoint that is not quantised.

        Raises ConfigurationError for what is unknown, not supported, or contradicts itself.
        """
        values = _quantization_config(config, where)
        beside = str(Path(where).with_name("hf_quant_config.json"))
        old = modelopt_values(hf_quant_config or {}, beside)
        if not {"quant_algo", "kv_cache_scheme"} & set(old):
            old = {}
        if not values and not old:
            return None
        if not values:
            said = Said(old, beside)
            return cls(beside, kv_cache_of(said), rule_of("modelopt", said))
        method = method_of(Said(values, where))
        if method == "modelopt":
            values = _both(modelopt_values(values, where), where, old, beside)
        elif old:
            raise ConfigurationError(
                f"{where} says that the weights were quantised with {method!r}, and {beside} that "
                "they were with 'modelopt'; remove what is wrong."
            )
        said = Said(values, where)
        return cls(where, kv_cache_of(said), rule_of(method, said))

    def format_of(self, module: str) -> StoredFormat | None:
        """How the weight of a linear layer is stored; None: as it is, in 16 or 32 bits. `module`:
        its name in the checkpoint, without ".weight". Raises ConfigurationError where different
        things are said of the parts of a fused weight."""
        if module not in self._formats:
            self._formats[module] = self._rule(module)
        return self._formats[module]


def _quantization_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What config.json has of it, there or in its text part; empty where there is none."""
    inner = next((one for one in map(config.get, TEXT_CONFIGS) if one is not None), None)
    places = [config, inner if isinstance(inner, Mapping) else {}]
    found = [place["quantization_config"] for place in places if place.get("quantization_config")]
    if any(not isinstance(one, Mapping) for one in found):
        raise ConfigurationError(f"{where} has a quantization_config that is no object.")
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigurationError(
            f"{where} has one quantization_config, and another in its text part; remove what is "
            "wrong."
        )
    return found[0] if found else {}


def _both(
    values: Mapping[str, Any], where: str, old: Mapping[str, Any], beside: str
) -> Mapping[str, Any]:
    """ModelOpt's two files as one: what config.json does not say, the older file does."""
    algos = [Said(one, where).algo("quant_algo") for one in (values, old)]
    if None not in algos and algos[0] != algos[1]:
        raise ConfigurationError(
            f"{where} says that quant_algo is {algos[0]}, and {beside} that it is {algos[1]}; "
            "remove what is wrong."
        )
    return {**old, **values}
