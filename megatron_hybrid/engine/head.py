"""Whether an engine's drafts come from the model's own head for multi-token prediction."""

from __future__ import annotations

import logging

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import has_mtp_weights
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext

logger = logging.getLogger(__name__)


def drafts_from_head(
    config: EngineConfig,
    folder: ModelFolder,
    parallel: ParallelContext,
    model: HybridModel | None = None,
) -> bool:
    """`model`: with its weights, where they are not to be read from the folder. Raises
    ConfigurationError where --drafter asks for a head that is not there."""
    if config.num_speculative_tokens == 0 or config.drafter == "prompt_lookup":
        return False
    reason = _why_not(config, folder, parallel, model)
    if not reason:
        if parallel.is_first:
            logger.info("drafts come from the model's head for multi-token prediction")
        return True
    if config.drafter == "heads":
        raise ConfigurationError(f"--drafter is heads. {reason}")
    if folder.config.mtp is not None and parallel.is_first:
        logger.warning("Drafts come from prompt lookup, not from the model's head. %s", reason)
    return False


def _why_not(
    config: EngineConfig,
    folder: ModelFolder,
    parallel: ParallelContext,
    model: HybridModel | None,
) -> str:
    """A sentence that says why the head cannot be used; empty where it can."""
    model_config = folder.config
    if model_config.mtp is None:
        return (
            f"The model in {folder.path} ({model_config.model_type}) has no head for multi-token "
            "prediction: its config.json describes none."
        )
    if model_config.mtp.unsupported:
        return model_config.mtp.unsupported
    if parallel.pipeline.size > 1:
        return (
            f"--pipeline-model-parallel-size is {parallel.pipeline.size}; with a head for "
            "multi-token prediction it can only be 1."
        )
    if parallel.experts.replicas.size > 1:
        return (
            f"{parallel.experts.replicas.size} replicas share the model's experts "
            "(--expert-model-parallel-size); a head for multi-token prediction needs all of them "
            "in one replica."
        )
    if model is not None:
        return "" if model.mtp is not None else "The model given was loaded without its head."
    if config.load_format == "dummy" or has_mtp_weights(folder):
        return ""
    return f"The weights of the head for multi-token prediction (mtp.*) are not in {folder.path}."
