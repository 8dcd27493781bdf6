"""Tiny random models, made with transformers, or by formulas of our own where it has none: the
oracle of the tests and their checkpoints."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_families import TINY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = tuple(TINY)
IN_TRANSFORMERS = tuple(name for name, tiny in TINY.items() if tiny.source == "transformers")
ATTENTION_ONLY = ("llama", "qwen3")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def tiny_configuration(family: str, *, chunk_size: int = 16, **overrides: Any) -> Any:
    """Of transformers' class, or of ours where it has none; the arguments are make_tiny_model's."""
    tiny = TINY[family]
    chunk = {} if tiny.chunk is None else {tiny.chunk: chunk_size}
    text = "Text" if tiny.text else ""
    configuration = getattr(import_module(tiny.source), f"{tiny.classes}{text}Config")
    return configuration(**_COMMON | tiny.values | chunk | overrides)


def make_tiny_model(
    family: str, folder: str | Path, *, seed: int = 0, chunk_size: int = 16, **overrides: Any
) -> PreTrainedModel:
    """Save a random model of `family` (one of FAMILIES) in `folder` and return it, in eval mode.

    `chunk_size` is the kernel chunk of Mamba2 and of gated delta nets; `overrides` go to the
    family's configuration. Weights are drawn so that activations neither vanish nor saturate:
    transformers' own initialisation gives nearly constant logits.
    """
    torch.manual_seed(0)
    tiny, made = TINY[family], tiny_configuration(family, chunk_size=chunk_size, **overrides)
    model: PreTrainedModel = getattr(import_module(tiny.source), f"{tiny.classes}ForCausalLM")(made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = draw(name, parameter, generator)
            if "embed" in name and model.config.tie_word_embeddings:
                drawn *= tiny.tied_scale  # or the likeliest token were always the last one again
            parameter.copy_(drawn)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.eval()
    model.save_pretrained(folder)
    if family == "olmo_hybrid":
        split_convolutions(Path(folder) / "model.safetensors")
    return model


def split_convolutions(path: Path) -> None:
    """As the released checkpoints have them: transformers 5.24 writes a convolution of q, k and v
    in three equal parts, whatever their sizes are."""
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("q_conv1d.weight")]:
        layer = name.removesuffix("q_conv1d.weight")
        names = [f"{layer}{kind}_conv1d.weight" for kind in "qkv"]
        sizes = [len(weights[f"{layer}{kind}_proj.weight"]) for kind in "qkv"]
        whole = torch.cat([weights[name] for name in names])
        weights |= dict(zip(names, map(torch.Tensor.clone, whole.split(sizes)), strict=True))
    save_file(weights, path, {"format": "pt"})


def draw(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape, last = like.shape, name.rsplit(".", 1)[-1]
    normal = torch.randn(shape, generator=generator)
    if last == "A_log":
        return (1 + 15 * torch.rand(shape, generator=generator)).log()
    if last == "dt_bias":
        return normal - 2.0
    if last == "bias":
        return 0.2 * normal
    if last.endswith(("states_scale", "residual_scale", "temp")):  # ZAYA's
        return 1 + 0.2 * normal
    if last == "D" or like.ndim == 1 and any(norm in name for norm in ("norm", ".ln", "_ln")):
        return 1 + 0.2 * normal
    if last.startswith("time_mix"):
        return torch.rand(shape, generator=generator)
    if last.startswith("time_"):  # decay and bonus of RWKV
        return normal - 1.0
    if name.endswith("norm.scale"):  # Inkling 2's
        return 1 + 0.2 * normal
    if "conv" in name and like.ndim == 3 or last == "static_weight":
        return 0.5 * normal
    if "embed" in name or "rel_logits" in name or name.endswith(("position_bias.proj", "query")):
        return normal
    if "router_mlp" in name:  # or all tokens had the same expert
        return normal * 3 / math.sqrt(shape[-1])
    return normal * 0.5 / math.sqrt(shape[-1])
