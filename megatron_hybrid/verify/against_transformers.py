"""The checks that need transformers' model: how much of it fits, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import psutil
import torch
from torch import Tensor

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weight_source import open_folder
from megatron_hybrid.models.checkpoints.weights import ON_THE_FLY
from megatron_hybrid.models.config import (
    INDEXED_LATENT_ATTENTION,
    LATENT_ATTENTION,
    SHARED_INDEX,
    resolve_dtype,
)
from megatron_hybrid.verify.comparison import Comparison, Truth, beside_cold
from megatron_hybrid.verify.dequantized import Weight, weights_of
from megatron_hybrid.verify.oracle import Oracle, OracleUnavailable, numbers_in, ties_layers
from megatron_hybrid.verify.report import Check, Report, not_checked
from megatron_hybrid.verify.rounding import Roundings
from megatron_hybrid.verify.ways import Way

# Bytes beside the weights.
ACTIVATIONS, ACTIVATIONS_ON_CPU = 8 << 30, 512 << 20
_CPU = torch.device("cpu")
_LATENT = {LATENT_ATTENTION, INDEXED_LATENT_ATTENTION, SHARED_INDEX}


def compute_dtype(config: EngineConfig, folder: ModelFolder, device: torch.device) -> torch.dtype:
    """What the engine computes in: see --dtype."""
    if config.dtype is None and device.type == "cpu":
        return torch.float32
    return resolve_dtype(config.dtype, folder.config.dtype)


def compare(
    config: EngineConfig,
    folder: ModelFolder,
    ways: list[Way],
    device: torch.device,
    wanted: str,
    report: Report,
) -> Iterator[Check]:
    """The engine's ways beside transformers', or, where that cannot be, beside one another; what is
    compared with goes into the report. `wanted`: --oracle."""
    dtype = compute_dtype(config, folder, device)
    is_exact = dtype == torch.float32 and folder.quantization is None
    is_exact &= config.quantization is None and config.kv_cache_dtype == "auto"
    try:
        if wanted == "none":
            raise OracleUnavailable("--oracle is none.")
        if folder.is_megatron:
            raise OracleUnavailable("transformers reads no Megatron checkpoints.")
        if config.load_format != "auto":
            raise OracleUnavailable("the weights are random.")
        if config.kv_cache_dtype != "auto" and _LATENT & set(folder.config.pattern):
            raise OracleUnavailable(
                f"--kv-cache-dtype is {config.kv_cache_dtype}: transformers' latents are not "
                "rounded."
            )
        with open_folder(folder, folder.config) as source:
            weights = weights_of(source)
            asking = _Asking(config, folder, weights, device, wanted)
            report.about["oracle"] = asking.description
            sequences = sorted({answer.tokens for way in ways for answer in way.answers})
            exact: Truth = asking.ask(sequences, torch.float32)
            usual: Truth | None = None
            if not asking.is_exact(dtype):
                usual = asking.ask(sequences, dtype, rounded=True)
    except Exception as raised:  # another library's, of a folder that may be full of surprises
        error = raised
        if not isinstance(raised, OracleUnavailable | ConfigurationError | WeightsError):
            error = OracleUnavailable(f"transformers fails: {type(raised).__name__}: {raised}")
        report.about["oracle"] = f"none: {error}"
        yield not_checked("logits beside transformers", f"not compared: {error}")
        yield from beside_cold(ways, exact=is_exact)
        return
    comparison = Comparison(ways, exact, usual, _rounded_states(config))
    for way in ways:
        yield from comparison.of(way)


def _rounded_states(config: EngineConfig) -> str:
    """Which states are kept in fewer bits than they are computed in: "cached", "all", or none."""
    if config.mamba_inference_ssm_states_dtype != "float32":
        return "all"
    cached = config.mamba_inference_cached_states_dtype
    return "" if cached in (None, "float32") else "cached"


class _Asking:
    """Where and in which parts transformers' model is asked."""

    def __init__(
        self,
        config: EngineConfig,
        folder: ModelFolder,
        weights: Mapping[str, Weight],
        device: torch.device,
        wanted: str,
    ) -> None:
        self._config, self._weights = config, weights
        self._folder = str(folder.described or folder.path)
        whole, largest = (4 * numbers for numbers in numbers_in(weights))
        self._device, self._by_layer = _place(whole, largest, device, wanted)
        if self._by_layer and ties_layers(self._folder):
            raise OracleUnavailable(
                f"its layers share weights, and {whole / 2**30:.0f} GiB for all of them in float32 "
                "are not free."
            )

    @property
    def description(self) -> str:
        """For the report."""
        parts = "one layer at a time" if self._by_layer else "whole"
        return (
            f"transformers in float32, {parts}, on {self._device.type}; what quantised weights "
            "mean is read by this engine's own code"
        )

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether the engine rounds nothing that transformers in float32 does not."""
        config = self._config
        rounds = config.quantization is not None or config.kv_cache_dtype != "auto"
        inputs = any(weight.roundings() for weight in self._weights.values())
        return dtype == torch.float32 and not rounds and not inputs

    def ask(
        self, sequences: Sequence[tuple[int, ...]], dtype: torch.dtype, *, rounded: bool = False
    ) -> dict[tuple[int, ...], Tensor]:
        """Log-probabilities of each sequence; `rounded`: inputs, keys and values as the engine
        has them."""
        weights, rounding = self._weights, None
        if rounded:
            on_the_fly: WeightFormat | None = None
            if self._config.quantization is not None:
                on_the_fly = ON_THE_FLY[self._config.quantization]
            rounding = Roundings(dtype, self._config.kv_cache_dtype != "auto", on_the_fly)
            weights = {name: rounding.noted(weight) for name, weight in weights.items()}
        oracle = Oracle(
            self._folder, weights, device=self._device, dtype=dtype, by_layer=self._by_layer
        )
        with rounding or nullcontext():
            found = dict(zip(sequences, oracle.logprobs(sequences), strict=True))
        if any(bool(rows.isnan().any()) for rows in found.values()):
            raise OracleUnavailable(f"transformers' own results in {dtype} are no numbers.")
        return found


def _place(
    whole: int, largest: int, device: torch.device, wanted: str
) -> tuple[torch.device, bool]:
    """A device with memory for the model, in bytes, or for its largest layer; and whether it is
    for one layer at a time."""
    places = [(_CPU, psutil.virtual_memory().available - ACTIVATIONS_ON_CPU)]
    if device.type == "cuda":
        places.insert(0, (device, torch.cuda.mem_get_info(device)[0] - ACTIVATIONS))
    for place, free in places:
        if wanted in ("auto", "whole") and whole < free:
            return place, False
        if wanted in ("auto", "layers") and 2 * largest < free:
            return place, True
    needed = whole if wanted == "whole" else 2 * largest
    raise OracleUnavailable(
        f"{needed / 2**30:.1f} GiB for transformers' model in float32 are not free."
    )
