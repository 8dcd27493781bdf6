"""What a Megatron checkpoint without a config.json says that the model is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.megatron_arguments import MegatronArguments
from megatron_hybrid.models.megatron_folder import checkpoint_folder
from megatron_hybrid.models.megatron_pickle import read_torch
from megatron_hybrid.models.megatron_to_hugging_face import with_model_type


def read_config(folder: Path) -> HybridModelConfig:
    """From the arguments in common.pt, and the end tokens of a generation_config.json in `folder`.

    Its model_type is that of the family that has just this model, else "megatron". Raises
    ConfigurationError where there are no arguments, or for a model that we have not.
    """
    try:
        path = checkpoint_folder(folder) / "common.pt"
        common = read_torch(path) if path.is_file() else {}
    except WeightsError as error:
        raise ConfigurationError(str(error)) from error
    arguments = common.get("args") if isinstance(common, dict) else None
    if arguments is None or not hasattr(arguments, "__dict__"):
        raise ConfigurationError(
            f"The Megatron checkpoint in {folder} does not say what the model is: common.pt holds "
            "no arguments, and there is no config.json of Hugging Face's beside it; put one there."
        )
    config = MegatronArguments(vars(arguments), str(path)).config()
    config = replace(config, eos_token_ids=_end_tokens(folder))
    return with_model_type(config)[0]


def _end_tokens(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        value = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)
