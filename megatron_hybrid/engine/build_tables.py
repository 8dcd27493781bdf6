"""EngineConfig -> tables of n-gram embeddings in the host's memory."""

from __future__ import annotations

import os

import torch

from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build_host_memory import FLAG as CACHED
from megatron_hybrid.engine.host_memory import available_memory
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.ngram_table import NGramTable
from megatron_hybrid.models.config import NGRAM_EMBEDDING
from megatron_hybrid.models.hybrid_model import HybridModel

FLAG = "--ngram-embeddings-on-host"


def on_host(config: EngineConfig, device: torch.device) -> bool:
    """Whether tables are apart from the model's other weights, which a CPU has there anyway."""
    return config.ngram_embeddings_on_host and device.type == "cuda"


def check_tables(config: EngineConfig, shapes: HybridModel) -> None:
    """Raise ConfigurationError for a model without tables, and for those that do not fit. shapes:
    the model, whose weights need not be there."""
    if not config.ngram_embeddings_on_host:
        return
    if NGRAM_EMBEDDING not in shapes.config.pattern:
        raise ConfigurationError(
            f"{FLAG} is given, but the model ({shapes.config.model_type}) has no embeddings of "
            "n-grams; leave it out."
        )
    tables = [layer for layer in shapes.modules() if isinstance(layer, NGramTable)]
    needed = sum(table.there.nbytes for table in tables if table.on_host)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    left, cached = available_memory() // processes, config.prefix_caching_host_gb
    if needed + cached * GIB > left:
        beside = f" and {CACHED} {cached:g}" if cached else ""
        raise ConfigurationError(
            f"{FLAG}: this rank's part of the tables takes {needed / GIB:.2f} GB{beside}; "
            f"{left / GIB:.2f} GB of the host's memory are left for each of the {processes} "
            "processes that run on it."
        )
