"""A model with its weights, only this rank's slices, straight into place: from a Hugging Face
folder of safetensors or a Megatron checkpoint. New ones come later, by updates.py."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.layers.linear import LinearPart
from megatron_hybrid.layers.parts import Part
from megatron_hybrid.models.blocks import ModelFormats
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.kv_scales import read_kv_scales
from megatron_hybrid.models.checkpoints.placing import (
    check_placed,
    open_weights,
    place_parts,
    put_all,
)
from megatron_hybrid.models.checkpoints.quantized_weights import (
    stored_format,
    used_place,
    weight_format,
)
from megatron_hybrid.models.checkpoints.weight_source import (
    open_folder,
)
from megatron_hybrid.models.config import resolve_dtype
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext


def load_model(
    folder: ModelFolder | str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype | str | None,
    parallel: ParallelContext,
    conv_states_dtype: torch.dtype | None = None,
    ssm_states_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    load_format: str = "auto",
    seed: int = 1234,
    progress: bool = True,
    mtp: bool = False,
    quantization: str | None = None,
    replay_chunk: int | None = None,
    tables_on_host: bool = False,
) -> HybridModel:
    """The model of a Hugging Face folder or a Megatron checkpoint, with this rank's weights on
    `device`.

    `dtype` None or "auto": the checkpoint's. `conv_states_dtype`, `kv_dtype` None: the model's; in
    FP8 keys and values have the checkpoint's scales where it has some, else 1. `load_format`
    "dummy" draws random weights from `seed`, the same for any number of ranks, and needs only
    config.json. `mtp`: with its head for multi-token prediction. `quantization`: see `formats_of`.
    `replay_chunk`, `tables_on_host`: of HybridModel.
    Raises ConfigurationError for what is not supported, before any weight is read, and
    WeightsError, naming the weight, for a checkpoint that does not fit its configuration.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigurationError(f"--load-format is {load_format!r}; it can be auto or dummy.")
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder.open(folder)
    dtype = resolve_dtype(dtype, folder.config.dtype)
    with torch.device(device):
        model = HybridModel(
            folder.config,
            parallel,
            dtype,
            conv_states_dtype or dtype,
            ssm_states_dtype,
            kv_dtype,
            mtp,
            formats_of(folder, quantization, load_format),
            replay_chunk,
            tables_on_host,
        )
    model.eval()
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        with open_weights(folder, folder.config) as source:
            placed = place_parts(model.weight_parts(), source)
            check_placed(model, placed, source)
            put_all(placed, source, progress and parallel.is_first)
            if kv_dtype == FP8:
                read_kv_scales(model, source)
    model.after_loading()
    return model


# Formats that weights in 16 or 32 bits are rounded to while they are read.
ON_THE_FLY = {
    "fp8": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8_block": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
}
# What stays as it is: the vocabulary's, what recurrences' step sizes, gates and exponents come
# from, and an index's gates and weights.
NEVER_ROUNDED = re.compile(
    r"lm_head|embedding"
    r"|mixer\.(in_proj_(a|b|ba)|x_proj|dt_proj|time_key|[if]gate_preact)\.weight"
    r"|indexer\.(index_kpool_compress_gate|weights_proj)\."
)


def formats_of(
    folder: ModelFolder, quantization: str | None, load_format: str = "auto"
) -> ModelFormats:
    """How a model keeps its weights: as the folder has them, or, if they are not quantised there,
    as `quantization` says, a key of ON_THE_FLY. Raises ConfigurationError for both at once."""
    said, names = folder.quantization, None
    if quantization is not None and said is not None:
        raise ConfigurationError(
            f"--quantization is {quantization}, but the weights in {folder.path} are quantised "
            f"already ({said.where}); leave the flag out."
        )
    config = folder.config
    if said is not None and load_format == "auto":
        with open_folder(folder, config) as source:
            names = frozenset(source.names)

    def format_of(block: int | None, role: str) -> WeightFormat | None:
        if said is not None:
            places = family_of(config.model_type).places(config, block, role)
            return weight_format(stored_format(said, used_place(places, names).name, names))
        if quantization is None or NEVER_ROUNDED.search(role):
            return None
        return ON_THE_FLY[quantization]

    return format_of


def rounded_weights(model: HybridModel) -> list[Tensor]:
    """The weights [N, K] of dense linear layers that `--quantization` would round, with whatever
    lies in one piece with them: the gates of a delta net."""
    found: dict[int, Tensor] = {}
    for _, part in model.weight_parts():
        if not isinstance(part, LinearPart) or isinstance(part.target, QuantizedWeight):
            continue
        if NEVER_ROUNDED.search(part.role) or ".experts." in part.role:
            continue
        for weight in part.layer.plain_weights():
            found[id(weight)] = weight
    return list(found.values())


def has_mtp_weights(folder: ModelFolder) -> bool:
    """Whether a folder holds the head that the configuration describes: some hold a model without
    it. Raises WeightsError for one without weights."""
    if folder.is_megatron:
        return False  # which are not read
    with open_folder(folder, folder.config) as source:
        (fc,) = source.places(len(folder.config.pattern), "mtp.fc.weight")
        return fc.name in source.names


def _fill_randomly(model: HybridModel, seed: int) -> None:
    """Every rank draws whole weights, on the model's device, and keeps its slice."""
    device = next(model.parameters()).device
    whole: tuple[str, Tensor] | None = None  # parts of one weight follow one another
    for block, part in model.weight_parts():
        name = f"{block}.{part.role}"
        if whole is None or whole[0] != name:
            whole = name, _random(part, device, seed ^ zlib.crc32(name.encode()))
        part.put(whole[1][part.source])


def _random(part: Part, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    name = part.role.rsplit(".", 1)[-1]
    if name in ("A_log", "dt_bias"):
        # A in [1, 16], step sizes around 0.01: what Mamba2 is initialised with.
        uniform = torch.rand(part.shape, generator=generator, device=device)
        return (1 + 15 * uniform).log() if name == "A_log" else uniform * 2 - 5.5
    if len(part.shape) == 1:
        is_bias = name.endswith(("bias", "biases"))
        return torch.zeros(part.shape, device=device).add_(0.0 if is_bias else 1.0)
    normal = torch.randn(part.shape, generator=generator, device=device)
    # Behind two small layers a router would send all tokens to one expert.
    scale = 3.0 if ".router_mlp." in part.role else 0.5
    return normal.mul_(scale / part.shape[-1] ** 0.5)
