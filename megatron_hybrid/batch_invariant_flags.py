"""Which flags do not go together with --batch-invariant."""

from __future__ import annotations

import os
from typing import Any

from megatron_hybrid.errors import ConfigurationError


def from_environment() -> bool:
    """Whether batch-invariant mode is wanted where nothing else says so."""
    return os.environ.get("MEGATRON_HYBRID_BATCH_INVARIANT", "0") not in ("", "0")


def check_batch_invariant(config: Any) -> None:
    """Raise ConfigurationError for an EngineConfig in that mode with a flag that breaks it."""
    with_mode = "--batch-invariant does not go together with"
    for flag, value, allowed, why in (
        ("kernels", config.kernels, ("auto", "reference"), "whose sums depend on the batch"),
        ("transformer-impl", config.transformer_impl, ("local",), "whose products do, too"),
        (
            "mamba-inference-ssm-states-dtype", config.mamba_inference_ssm_states_dtype,
            ("float32",), "which are rounded wherever they are written",
        ),
        (
            "mamba-inference-cached-states-dtype", config.mamba_inference_cached_states_dtype,
            (None, "float32"), "which are rounded when they are cached",
        ),
        (
            "prefix-caching-host-kv-dtype", config.prefix_caching_host_kv_dtype,
            ("auto",), "which rounds what is moved there",
        ),
        (
            "prefix-caching-host-states-dtype", config.prefix_caching_host_states_dtype,
            ("auto",), "which rounds what is moved there",
        ),
    ):  # fmt: skip
        if value not in allowed:
            raise ConfigurationError(f"{with_mode} --{flag} {value}, {why}; leave one out.")
