"""What the model in a folder is: from a config.json, or from a Megatron checkpoint's arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.megatron_folder import (
    described_in,
    end_tokens,
    is_megatron_folder,
)
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.raw_config import RawConfig
from megatron_hybrid.models.families.registry import family_of


def read_config(folder: str | Path) -> HybridModelConfig:
    """Read config.json (and the end tokens of generation_config.json), or a Megatron checkpoint's
    arguments where there is none.

    Raises ConfigurationError for an architecture or an option that is not supported.
    """
    folder = Path(folder)
    described = described_in(folder)
    if described is None and is_megatron_folder(folder):
        return _of_arguments(folder)
    raw = RawConfig.from_folder(described or folder)
    return family_of(raw.model_type).config(raw)


def _of_arguments(folder: Path) -> HybridModelConfig:
    """From the training job's arguments, and the end tokens of what else is in `folder`.

    Its model_type is that of the family that has just this model, else "megatron". Raises
    ConfigurationError where there are no arguments, or for a model that we have not.
    """
    # torch.distributed.checkpoint takes a while, and few folders need it.
    from megatron_hybrid.models.checkpoints.megatron_arguments import MegatronArguments
    from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint
    from megatron_hybrid.models.checkpoints.megatron_to_hugging_face import with_model_type

    try:
        checkpoint = MegatronCheckpoint(folder)
        arguments = checkpoint.arguments
    except WeightsError as error:
        raise ConfigurationError(str(error)) from error
    if arguments is None:
        raise ConfigurationError(
            f"The Megatron checkpoint in {folder} does not say what the model is: it holds no "
            "arguments, and there is no config.json of Hugging Face's beside it; put one there."
        )
    config = MegatronArguments(arguments, str(checkpoint.folder)).config()
    config = replace(config, eos_token_ids=end_tokens(folder))
    return with_model_type(config)[0]
