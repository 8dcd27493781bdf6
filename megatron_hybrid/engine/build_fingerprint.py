"""What computes an engine's answers: device, versions, mode and model."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid import __version__
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.fingerprint import Fingerprint
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weight_digest import weight_digest

logger = logging.getLogger(__name__)

# Whose kernels may take part in a step.
LIBRARIES = ("triton", "flashinfer-python", "transformer-engine", "mamba-ssm", "causal-conv1d")
# Of EngineConfig what changes bits, besides groups' sizes and what `build_fingerprint` is told.
MODE = (
    "batch_invariant",
    "kernels",
    "transformer_impl",
    "fp8_format",
    "quantization",
    "inference_dynamic_batching_block_size",
    "mamba_inference_cached_states_dtype",
    "mamba_inference_stochastic_rounding",
    "symmetric_memory_all_reduce",
    "moe_token_dispatcher_type",
)
# The same, of those who give it alone.
ROUNDED = "prefix_caching_host_kv_dtype", "prefix_caching_host_states_dtype"


def build_fingerprint(
    config: EngineConfig, model: HybridModel, device: torch.device, chosen: Mapping[str, Any]
) -> Fingerprint:
    """Of an engine with the model's weights on `device`. chosen: types and numbers that are the
    engine's choice where the configuration leaves them out. All ranks that step together call it:
    what each has goes into it, in their order. The first one's log says it."""
    ranks = model.parallel.lockstep

    def weights() -> str:
        each = ranks.gather_objects(weight_digest(model))
        return each[0] if len(each) == 1 else sha256("".join(each).encode()).hexdigest()

    parts = {
        "device": _same(ranks.gather_objects(describe_device(device))),
        "versions": _same(ranks.gather_objects(_versions())),
        "mode": _mode(config, chosen),
        "model": {"config": _digest_of_config(model)},
    }
    fingerprint = Fingerprint(parts, weights)
    if model.parallel.is_first:
        logger.info("%s", fingerprint.describe())
    return fingerprint


def describe_device(device: torch.device) -> dict[str, Any]:
    """What of a device decides which kernels run and how they divide sums."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {
            "name": found.name,
            "compute_capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
        }
    return {
        "name": _cpu_name(),
        "vector_level": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    """As the system says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"megatron-hybrid": __version__, "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _mode(config: EngineConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    mode = {name: getattr(config, name) for name in MODE}
    mode["fp8_recipe"] = config.transformer_engine_recipe
    if config.mamba_inference_stochastic_rounding:
        mode["seed"] = config.seed  # which the chance comes from
    mode |= {name: value for name in ROUNDED if (value := getattr(config, name)) != "auto"}
    mode["parallel"] = list(config.parallel_sizes.numbers)
    return {**mode, **{name: _plain(value) for name, value in chosen.items()}}


def _digest_of_config(model: HybridModel) -> str:
    """Of what the model is, and of the scales of its keys and values in FP8, which no weight is."""
    scales = [(block, one.k_scale, one.v_scale) for block, _, one in model.attentions()]
    known = {**asdict(model.config), "kv_scales": model.parallel.lockstep.gather_objects(scales)}
    return sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _same(each: Sequence[Any]) -> Any:
    """What ranks have, once where it is the same."""
    return each[0] if all(one == each[0] for one in each) else list(each)


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
