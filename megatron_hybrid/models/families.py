"""All model families, by the model_type in config.json."""

from __future__ import annotations

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.bamba import Bamba
from megatron_hybrid.models.family import Family
from megatron_hybrid.models.granite_moe_hybrid import GraniteMoeHybrid
from megatron_hybrid.models.llama import Llama
from megatron_hybrid.models.nemotron_h import NemotronH
from megatron_hybrid.models.qwen3 import Qwen3

FAMILIES: tuple[Family, ...] = (NemotronH(), Bamba(), GraniteMoeHybrid(), Llama(), Qwen3())
BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(model_type: str) -> Family:
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise ConfigurationError(
            f"Models of type {model_type!r} are not supported, only {', '.join(BY_MODEL_TYPE)} are."
        )
    return family
