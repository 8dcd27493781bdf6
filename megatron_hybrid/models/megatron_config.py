"""What a Megatron checkpoint without a config.json says that the model is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.megatron_arguments import MegatronArguments
from megatron_hybrid.models.megatron_folder import end_tokens
from megatron_hybrid.models.megatron_to_hugging_face import with_model_type


def read_config(folder: Path) -> HybridModelConfig:
    """From the training job's arguments, and the end tokens of what else is in `folder`.

    Its model_type is that of the family that has just this model, else "megatron". Raises
    ConfigurationError where there are no arguments, or for a model that we have not.
    """
    from megatron_hybrid.models.megatron_checkpoint import MegatronCheckpoint  # takes a while

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
