"""Adapters of tiny models, made with PEFT: the oracle of the tests, and their folders."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.tiny_models import make_tiny_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Of a family: what its adapters adapt, all of it or some. PEFT refuses the out_proj of some.
TARGETS: dict[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, *MLP),
    "nemotron_h": (*ATTENTION, "up_proj", "down_proj", "in_proj"),
    "qwen3_5": (*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen4_exp": (
        *ATTENTION,
        *MLP,
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "key_proj",
        "value_proj",
    ),
    "falcon_mamba": ("in_proj", "x_proj", "dt_proj"),
    "jamba": (*ATTENTION, "in_proj", "x_proj", "dt_proj", "out_proj"),
    "olmo_hybrid": (*ATTENTION, *MLP, "g_proj", "a_proj", "b_proj"),
    "bailing_hybrid": (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        *MLP,
    ),
    "zaya": ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"),
    "kimi_linear": ("q_proj", "kv_a_proj_with_mqa", "o_proj", *MLP),
    "minimax": (*ATTENTION, "qkv_proj", "output_gate", "out_proj"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "inkling": (*ATTENTION, *MLP, "r_proj"),
    "inkling2": ("linear", "gate_proj", "sink_proj", "weight_proj"),
    "granite_moe_hybrid": (*ATTENTION, "input_linear", "output_linear", "in_proj", "out_proj"),
    "falcon_h1": (*ATTENTION, *MLP, "in_proj"),
    "zamba2": (*ATTENTION, "gate_up_proj", "down_proj", "in_proj", "out_proj"),
}


# Of a family with experts: its stacked weights.
EXPERTS = {
    "zaya": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "qwen3_next": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "inkling": (  # gates of shared experts could not be told from what they are gates of
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_experts.down_proj",
    ),
    "inkling2": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "jamba": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "granite_moe_hybrid": (
        "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj",
    ),
}  # fmt: skip


def with_experts(family: str, adapters: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same adapters, of experts too."""
    return {
        name: options | {"target_parameters": list(EXPERTS[family])}
        for name, options in adapters.items()
    }


# transformers multiplies with dt_proj.weight itself, which PEFT's layers know nothing of: their
# adapters are in it once they are merged.
MERGED = ("falcon_mamba", "jamba")


@dataclass
class Adapted:
    """A tiny model with PEFT's adapters on it."""

    family: str
    folder: Path
    model: Any
    adapters: dict[str, Path]
    answers: dict[tuple[Any, ...], Any]

    def logits(self, tokens: Sequence[int], adapter: str = "") -> torch.Tensor:
        """[tokens, vocabulary], by a full recompute."""
        self._choose(adapter)
        merged = bool(adapter) and self.family in MERGED
        with torch.no_grad():
            if merged:
                self.model.merge_adapter([adapter])
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
            if merged:
                self.model.unmerge_adapter()
        return logits

    def answer(self, prompt: Sequence[int], count: int, adapter: str = "") -> list[int]:
        """Greedy tokens."""
        key = (tuple(prompt), count, adapter)
        if key not in self.answers:
            text = list(prompt)
            for _ in range(count):
                text.append(int(self.logits(text, adapter)[-1].argmax()))
            self.answers[key] = text[len(prompt) :]
        return self.answers[key]

    def _choose(self, adapter: str) -> None:
        if not isinstance(self.model, PeftModel):
            return
        if adapter:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(adapter)
        else:
            self.model.base_model.disable_adapter_layers()


def make_adapted(
    family: str, folder: Path, adapters: dict[str, dict[str, Any]], **overrides: Any
) -> Adapted:
    """A tiny model in `folder`/model, and `adapt`."""
    model = make_tiny_model(family, folder / "model", **overrides)
    return adapt(family, folder, model, adapters)


def adapt(
    family: str,
    folder: Path,
    model: Any,
    adapters: dict[str, dict[str, Any]],
    strength: float = 0.2,
) -> Adapted:
    """Adapters of a model in `folder`/model, by LoraConfig's options, in `folder`/NAME each.
    `strength`: of what they add, beside weights as make_tiny_model draws them."""
    generator = torch.Generator().manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, options in adapters.items():
            config = LoraConfig(**{"target_modules": list(TARGETS[family]), **options})
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
            else:
                model = get_peft_model(model, config, adapter_name=name)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                size = 1.0 if "lora_B" in name else parameter.shape[1] ** -0.5
                parameter.data.copy_(drawn * size * strength**0.5)
        model.eval()
        model.save_pretrained(str(folder))
    return Adapted(family, folder / "model", model, {name: folder / name for name in adapters}, {})
