"""What a configuration, a model and a device have to do with one another: ConfigurationError with a
sentence where they do not go together."""

from __future__ import annotations

import torch

from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.linear.whole_tiles import places_matter
from megatron_hybrid.layers.convolved_attention import ConvolvedAttention
from megatron_hybrid.layers.latent_attention import LatentAttention
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.models.config import (
    GATED_DELTA_NET,
    MAMBA,
    MAMBA1,
    SHARED_TRANSFORMER,
    SHORT_CONV,
    SIDE_BY_SIDE,
)
from megatron_hybrid.models.hybrid_model import HybridModel


def check_batch_invariant(config: EngineConfig, shapes: HybridModel) -> None:
    """Raise ConfigurationError where the bits of an answer would not be its own."""
    if not config.batch_invariant:
        return
    for spec in shapes.stages.state_specs.values():
        if torch.promote_types(spec.conv_dtype, shapes.dtype) != spec.conv_dtype:
            kept, own = (str(one).removeprefix("torch.") for one in (spec.conv_dtype, shapes.dtype))
            raise ConfigurationError(
                "--batch-invariant does not go together with --mamba-inference-conv-states-dtype "
                f"{kept}, which rounds the model's {own} wherever a window is kept; leave one out."
            )


def check_products(config: EngineConfig, model: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where a CPU's library computes equal rows of a product otherwise by
    where they are: of each size of the model's weights."""
    if not config.batch_invariant or device.type != "cpu":
        return
    weights = [weight for weight, _ in model.plain_weights()]
    for layer in model.modules():
        if isinstance(layer, MoE | LatentAttention | ConvolvedAttention):
            weights += layer.plain_weights()
    for (rows, columns), weight in {weight.shape: weight for weight in weights}.items():
        if places_matter(weight):
            kind = str(model.dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"--batch-invariant cannot hold on this CPU: with weights of {rows} x {columns} in "
                f"{kind}, torch {torch.__version__} gives a row of inputs other bits in other "
                "places of a product; give another --dtype."
            )


def check_drafts(config: EngineConfig, geometry: CacheGeometry) -> None:
    """Raise ConfigurationError for more drafts than a state can be followed over."""
    drafts = config.num_speculative_tokens
    if geometry.needs_state and drafts >= geometry.grid:
        raise ConfigurationError(
            f"--num-speculative-tokens is {drafts}; with states kept every {geometry.grid} tokens "
            f"(--inference-dynamic-batching-block-size and the model's kernels), it can be at most "
            f"{geometry.grid - 1}."
        )


def check_quantized(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where the device has no kernels for quantised weights."""
    if device.type != "cuda" or config.kernels == "reference" or not shapes.is_quantized:
        return
    found = torch.cuda.get_device_capability(device)
    if found < (9, 0):
        raise ConfigurationError(
            "The kernels for quantised weights need a GPU of compute capability 9.0 (Hopper) or "
            f"newer; {device} has {found[0]}.{found[1]}. --kernels reference computes them in "
            "plain torch, slowly."
        )


def check_transformer_engine(
    config: EngineConfig, shapes: HybridModel, device: torch.device
) -> None:
    """Raise ConfigurationError where Transformer Engine is wanted and cannot be used."""
    if config.transformer_impl == "local":
        return
    wanted = "--transformer-impl is transformer_engine, but "
    if device.type != "cuda":
        raise ConfigurationError(f"{wanted}the device is a {device.type}; it needs a GPU.")
    if shapes.is_quantized:
        raise ConfigurationError(
            f"{wanted}the checkpoint is quantised; leave the flag out: our own layers compute with "
            "weights as they are stored."
        )
    if shapes.dtype == torch.float32:
        raise ConfigurationError(
            f"{wanted}the model is in float32, of which its products keep 10 bits; give --dtype "
            "bfloat16 or float16."
        )
    if not kernel_set.has_transformer_engine():
        raise ConfigurationError(
            f"{wanted}it is not installed; `pip install --no-build-isolation "
            "transformer-engine[pytorch]` brings it."
        )
    try:
        kernel_set.import_transformer_engine()
    except Exception as error:  # whatever its own libraries miss
        raise ConfigurationError(
            f"{wanted}it cannot be imported ({type(error).__name__}: {error}); is it installed "
            "with its extension for torch, transformer-engine[pytorch], and for this torch?"
        ) from error
    found = torch.cuda.get_device_capability(device)
    needed = (9, 0) if config.transformer_engine_recipe == "blockwise" else (8, 9)
    if config.fp8_format is not None and found < needed:
        recipe = f" --fp8-recipe {config.fp8_recipe}" if config.fp8_recipe else ""
        raise ConfigurationError(
            f"--fp8-format {config.fp8_format}{recipe} needs a GPU of compute capability "
            f"{needed[0]}.{needed[1]} or newer; {device} has {found[0]}.{found[1]}."
        )


_PACKAGES = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}  # by what is imported
_MAMBA = {MAMBA, MAMBA1, SIDE_BY_SIDE, SHARED_TRANSFORMER}  # layers with a scan of mamba-ssm
# What causal-conv1d computes.
_CONV_CHANNELS, _CONV_WIDTHS = 8, range(2, 5)


def check_libraries(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where mamba-ssm and causal-conv1d are wanted and cannot be used."""
    if config.kernels != "libraries":
        return
    wanted = "--kernels is libraries, but "
    if device.type != "cuda":
        raise ConfigurationError(
            f"{wanted}the device is a {device.type}; mamba-ssm and causal-conv1d need a GPU."
        )
    kinds, name = set(shapes.config.pattern), shapes.config.model_type
    if GATED_DELTA_NET in kinds:
        raise ConfigurationError(
            f"{wanted}the model ({name}) has layers with a gated delta rule, of which mamba-ssm "
            "and causal-conv1d have no kernel; use --kernels auto or reference."
        )
    needed = ["causal_conv1d"] if kinds & (_MAMBA | {SHORT_CONV}) else []
    needed += ["mamba_ssm"] if kinds & _MAMBA else []
    if not needed:
        raise ConfigurationError(
            f"{wanted}the model ({name}) has no layer that mamba-ssm or causal-conv1d computes."
        )
    _check_calls(config, shapes, wanted)
    _check_installed(needed, wanted, device)


def _check_calls(config: EngineConfig, shapes: HybridModel, wanted: str) -> None:
    """Whether the libraries have kernels for what is called."""
    no_runs = f"{wanted}mamba-ssm and causal-conv1d have no kernel for"
    if drafts := config.num_speculative_tokens:
        raise ConfigurationError(
            f"{no_runs} decodes of several tokens; --num-speculative-tokens is {drafts} and must "
            "be 0."
        )
    if config.mamba_inference_stochastic_rounding:
        raise ConfigurationError(
            f"{wanted}mamba-ssm rounds states to the nearest; leave out "
            "--mamba-inference-stochastic-rounding."
        )
    interval = config.mamba_inference_state_write_interval
    if interval not in (None, 1):
        raise ConfigurationError(
            f"{no_runs} inputs that wait to go into a state; "
            f"--mamba-inference-state-write-interval is {interval} and must be 1."
        )
    for spec in shapes.stages.state_specs.values():
        channels, width = spec.conv_shape[0], spec.conv_shape[1] + 1
        if channels and (channels % _CONV_CHANNELS or width not in _CONV_WIDTHS):
            raise ConfigurationError(
                f"{wanted}a convolution has {channels} channels on a rank and width {width}; "
                f"causal-conv1d computes multiples of {_CONV_CHANNELS} channels, and widths "
                f"{_CONV_WIDTHS[0]} to {_CONV_WIDTHS[-1]}."
            )


def _check_installed(needed: list[str], wanted: str, device: torch.device) -> None:
    if missing := kernel_set.missing_libraries(needed):
        packages = [_PACKAGES[module] for module in missing]
        raise ConfigurationError(
            f"{wanted}{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not "
            f"installed; `pip install --no-build-isolation {' '.join(packages)}` brings "
            f"{'it' if len(packages) == 1 else 'them'}."
        )
    try:
        kernel_set.select("libraries", device)
    except Exception as error:  # whatever their own libraries miss
        raise ConfigurationError(
            f"{wanted}they cannot be imported ({type(error).__name__}: {error}); are they "
            "installed for this torch?"
        ) from error


def check_kv_dtype(config: EngineConfig, shapes: HybridModel, device: torch.device) -> None:
    """Raise ConfigurationError where keys and values can't be stored as wanted."""
    if config.kv_cache_dtype == "auto":
        return
    wanted = f"--kv-cache-dtype is {config.kv_cache_dtype}, but "
    if not shapes.stages.kv_specs:
        kind = shapes.config.model_type
        raise ConfigurationError(f"{wanted}the model ({kind}) has no attention, so it stores none.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigurationError(
            f"{wanted}GPUs convert FP8 from compute capability 8.9 on; {device} has {capability}."
        )
