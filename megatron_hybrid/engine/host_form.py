"""EngineConfig -> what caches become in memory of the host: what they are, or rounded to 8 bits."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.sizing import bytes_per_state, packed_states_dtype
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.page_parts import HostForm, kv_row_bytes
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.stages import ModelStages

KV, STATES = "--prefix-caching-host-kv-dtype", "--prefix-caching-host-states-dtype"


def check_form(config: EngineConfig) -> None:
    """Raises ConfigurationError for what can't be rounded in memory of the host."""
    for flag, value in _given(config):
        if not config.prefix_caching_host_gb:
            raise ConfigurationError(
                f"{flag} is {value}, but there is nothing to be rounded: --prefix-caching-host-gb "
                "is 0."
            )
        if config.role != "both":
            raise ConfigurationError(
                f"{flag} is {value}, but --role is {config.role}: what is handed over between "
                "servers is what was computed; leave one out."
            )


def form_of(config: EngineConfig, model: HybridModel) -> HostForm:
    """As `check_form` allows. Raises ConfigurationError for what is rounded on the device."""
    given = dict(_given(config))
    narrow = [spec.dtype for spec in model.stages.kv_specs.values() if spec.dtype.itemsize == 1]
    if KV in given and narrow:
        raise ConfigurationError(
            f"{KV} is {given[KV]}, but keys and values have 8 bits on the device, too "
            "(--kv-cache-dtype), and are moved as they are; leave it out."
        )
    if STATES in given and packed_states_dtype(config) is not None:
        raise ConfigurationError(
            f"{STATES} is {given[STATES]}, but cached states are rounded on the device "
            "(--mamba-inference-cached-states-dtype), and are moved as they are; leave one out."
        )
    return HostForm(
        FP8 if KV in given else None,
        torch.int8 if STATES in given else None,
        {layer: spec.scaled_over for layer, spec in model.state_specs.items()},
    )


def host_geometry(geometry: CacheGeometry, form: HostForm, stages: ModelStages) -> CacheGeometry:
    """The device's, with the bytes of the whole model that blocks and states have in host memory:
    the same on all ranks."""
    if form.kv is not None and geometry.has_attention:
        sizes = [
            kv_row_bytes((geometry.block_size, spec.num_kv_heads, dim))
            for spec in stages.kv_specs.values()
            for dim in spec.dims
            if dim
        ]
        sizes += [geometry.block_size * one.index_bytes for one in stages.kv_specs.values()]
        geometry = replace(geometry, bytes_per_block=sum(sizes))
    if form.states is not None and geometry.has_recurrent:
        size = bytes_per_state(stages.state_specs.values(), form.states)
        geometry = replace(geometry, bytes_per_state=size)
    return geometry


def _given(config: EngineConfig) -> list[tuple[str, str]]:
    values = config.prefix_caching_host_kv_dtype, config.prefix_caching_host_states_dtype
    return [
        (flag, value) for flag, value in zip((KV, STATES), values, strict=True) if value != "auto"
    ]
