"""What a worker can't be, found before its engine starts."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import ParallelSizes, is_started_as_rank


def check_ranks(sizes: ParallelSizes) -> None:
    """ConfigurationError for ranks that a worker can't have."""
    if is_started_as_rank():
        raise ConfigurationError(
            "A worker starts its own ranks (--tensor-model-parallel-size and the like): start it "
            "without torchrun, once for each replica of the model."
        )
    if sizes.replicas_in_lockstep > 1:
        raise ConfigurationError(
            f"Experts are split over {sizes.expert_group} ranks (--expert-model-parallel-size, "
            f"--expert-tensor-parallel-size) and other layers over {sizes.tensor} "
            "(--tensor-model-parallel-size): several replicas would share them, and a Dynamo "
            "worker is one replica. Make both the same."
        )


def check_block_size(size: int, environment: Mapping[str, str]) -> None:
    """ConfigurationError where the front end's router is set to other blocks than the engine's."""
    wanted = environment.get("DYN_KV_CACHE_BLOCK_SIZE")
    if wanted and wanted != str(size):
        raise ConfigurationError(
            f"The engine's KV blocks have {size} tokens "
            f"(--inference-dynamic-batching-block-size), but DYN_KV_CACHE_BLOCK_SIZE is {wanted}: "
            "Dynamo's router finds prefixes only if both are the same."
        )
