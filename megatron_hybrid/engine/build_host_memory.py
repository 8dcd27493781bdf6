"""EngineConfig -> memory of the host behind the device's caches, and files behind that."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_hybrid.cache.geometry import GIB, CacheGeometry
from megatron_hybrid.cache.host_store import pages_per_state
from megatron_hybrid.cache.host_tier import HostTier
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lower_tier import LowerTier
from megatron_hybrid.cache.object_store import ObjectStore
from megatron_hybrid.cache.replay_cost import queue_of
from megatron_hybrid.cache.stored_prefixes import StoredPrefixes
from megatron_hybrid.cache.stores.disk import DiskStore
from megatron_hybrid.cache.stores.mooncake import LEAST_BUFFER, MooncakeStore
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.build_disaggregation import begin_disaggregation, check_disaggregation
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.host_form import check_form, form_of, host_geometry
from megatron_hybrid.engine.host_memory import available_memory
from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.sizing import bytes_per_state
from megatron_hybrid.engine.transfers import HostTransfers, Transfers
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.host_copies import PIECE_BYTES, CudaHostCopier, HostCopier
from megatron_hybrid.execution.page_parts import PageParts
from megatron_hybrid.layers.inputs import LayerCaches, StateSpec
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.models.hybrid_model import HybridModel

logger = logging.getLogger(__name__)

FLAG = "--prefix-caching-host-gb"
DISK, DISK_SIZE = "--prefix-caching-disk", "--prefix-caching-disk-gb"
STORE = "--prefix-caching-store"
# Operations a second of long prompts, by and large: what is fetched takes mostly a hundredth of the
# time that computing it does, so that little depends on it.
_OPERATIONS = {"cuda": 400e12, "cpu": 50e9}


def check_host_memory(config: EngineConfig, shapes: HybridModel) -> None:
    """Raises ConfigurationError for what can't have memory of the host behind its caches, which
    disks, stores and other engines are behind."""
    wanted = f"{FLAG} is {config.prefix_caching_host_gb:g}"
    policy = config.inference_dynamic_batching_prefix_caching_eviction_policy
    _check_lower(config)
    check_disaggregation(config)
    check_form(config)
    if not config.prefix_caching_host_gb:
        return
    if not config.inference_dynamic_batching_prefix_caching or policy == "ref_zero":
        raise ConfigurationError(
            f"{wanted}, but nothing is kept that could be moved there: prefix caching is off, or "
            "--inference-dynamic-batching-prefix-caching-eviction-policy is ref_zero."
        )
    if any(spec.window for spec in shapes.stages.kv_specs.values()):
        raise ConfigurationError(
            f"{wanted}, but the model ({shapes.config.model_type}) has layers with a sliding "
            "window, whose keys and values are not moved there; leave it out."
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    left = available_memory() // processes
    if config.prefix_caching_host_gb * GIB > left:
        raise ConfigurationError(
            f"{wanted}; {left / GIB:.2f} GB of the host's memory are left for each of the "
            f"{processes} processes that run on it."
        )


def staging_bytes(config: EngineConfig, states: Iterable[StateSpec]) -> int:
    """On the device, for what is on its way: two pieces and states in each direction."""
    if not config.prefix_caching_host_gb:
        return 0
    return 4 * (PIECE_BYTES + bytes_per_state(states))


def host_transfers(
    config: EngineConfig,
    cache: HybridCache,
    caches: LayerCaches,
    model: HybridModel,
    device: torch.device,
) -> Transfers:
    """As `check_host_memory` allows. Raises ConfigurationError where there is no room for a single
    sequence."""
    if not config.prefix_caching_host_gb:
        return Transfers()
    agreement, form = Agreement(model.parallel.replica), form_of(config, model)
    _check_states(config, cache.geometry)
    geometry = host_geometry(cache.geometry, form, model.stages)
    page = PageParts.of(caches, form).page_bytes(pages_per_state(geometry))
    (pages,) = agreement.least([int(config.prefix_caching_host_gb * GIB) // page])
    _check_size(config, geometry, pages, page)
    copier = (CudaHostCopier if device.type == "cuda" else HostCopier)(caches, pages, page, form)
    rate = copier.rate()
    here = max(1, int(rate * _seconds_of_a_token(model, device)))
    (bytes_per_token,) = agreement.least([here])
    policy = config.inference_dynamic_batching_prefix_caching_eviction_policy
    logger.info(
        "memory of the host: %.2f GB, %d pages of %d bytes; a state takes %d",
        config.prefix_caching_host_gb, pages, page, pages_per_state(geometry),
    )  # fmt: skip
    tier = HostTier(cache.store, pages, queue_of(policy), bytes_per_token, geometry)
    tier.rate = int(rate)
    return HostTransfers(cache, tier, copier, agreement)


def begin_lower_tier(
    config: EngineConfig,
    engine: DynamicInferenceEngine,
    model: HybridModel,
    device: torch.device,
) -> None:
    """Have what is in host memory written to files or a store, and read again, or handed over to
    other servers, if that is wanted. Raises ConfigurationError for what can't be used."""
    transfers, fingerprint = engine.context.transfers, engine.weights.fingerprint
    if not isinstance(transfers, HostTransfers):
        return
    if config.role != "both":
        begin_disaggregation(config, transfers, model, engine)
        return
    if config.prefix_caching_disk is None and config.prefix_caching_store is None:
        return
    assert isinstance(transfers.copier, HostCopier)
    tier, parallel = transfers.tier, model.parallel
    page = transfers.copier.page_bytes
    store = _store(config, page, tier.host.pages_per_state)
    part = [page, *((group.rank, group.size) for group in (parallel.tensor, parallel.pipeline))]
    if config.enable_return_routed_experts:
        part.append("routed experts")
    transfers.add_lower(
        LowerTransfers(
            LowerTier(tier),
            StoredPrefixes(store, tier.host.geometry),
            transfers.copier.views,
            lambda: f"{fingerprint.short} {part}",
            _seconds_of_a_token(model, device),
            agreement=Agreement(parallel.replica),
        )
    )


def _store(config: EngineConfig, page: int, pages_per_state: int) -> ObjectStore:
    if config.prefix_caching_store is None:
        assert config.prefix_caching_disk is not None
        return DiskStore(Path(config.prefix_caching_disk), int(config.prefix_caching_disk_gb * GIB))
    buffer = max(LEAST_BUFFER, 4 * pages_per_state * page)
    return MooncakeStore(config.prefix_caching_store, buffer_bytes=buffer)


def _check_lower(config: EngineConfig) -> None:
    folder, size = config.prefix_caching_disk, config.prefix_caching_disk_gb
    store = config.prefix_caching_store
    if (folder is None) != (not size):
        raise ConfigurationError(
            f"{DISK} is {folder or 'not given'}, and {DISK_SIZE} is {size:g}: files need both, a "
            "folder and a size."
        )
    if folder is not None and store is not None:
        raise ConfigurationError(
            f"{DISK} is {folder}, and {STORE} is {store}: one of them can be below memory of the "
            "host."
        )
    for flag, value in ((DISK, folder), (STORE, store)):
        if value is not None and not config.prefix_caching_host_gb:
            raise ConfigurationError(
                f"{flag} is {value}, but what is there is written from memory of the host, and "
                f"read into it: {FLAG} is 0."
            )


def _check_states(config: EngineConfig, geometry: CacheGeometry) -> None:
    if geometry.has_recurrent and not geometry.num_cached_slots:
        raise ConfigurationError(
            f"{FLAG} is {config.prefix_caching_host_gb:g}, but the device has no room for a cached "
            "state that could be moved there "
            "(--inference-dynamic-batching-prefix-caching-mamba-gb)."
        )


def _check_size(config: EngineConfig, geometry: CacheGeometry, pages: int, page: int) -> None:
    least = 1 + pages_per_state(geometry)
    if pages < least:
        raise ConfigurationError(
            f"{FLAG} is {config.prefix_caching_host_gb:g}, which is {pages} pages of "
            f"{page:,} bytes; a state and the KV before it need {least}."
        )


def _seconds_of_a_token(model: HybridModel, device: torch.device) -> float:
    """That computing one takes, about."""
    return 2 * _weights_of_a_token(model) / _OPERATIONS[device.type]


def _weights_of_a_token(model: HybridModel) -> float:
    """That one token is multiplied with, about."""
    total: float = sum(weight.numel() for weight in model.parameters())
    for layer in model.modules():
        if isinstance(layer, MoE):
            experts = [*layer.up_proj.parameters(), *layer.down_proj.parameters()]
            every = sum(weight.numel() for weight in experts)
            total -= every * (1 - layer.config.experts_per_token / layer.config.num_experts)
    return total
