"""ZAYA as it was released before transformers had it (ZAYA1-base, ZAYA1-reasoning-base, the legacy
folders): by Megatron's names, and with what are two blocks here as two layers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import EXPERTS, HybridModelConfig
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.raw_config import RawConfig

LEGACY = "zaya_legacy"  # what such a model's type is called here
_ALWAYS = (
    "cca", "zaya_use_eda", "zaya_use_mod", "scale_residual_merge", "gated_linear_unit",
    "residual_in_fp32",
)  # fmt: skip
_NEVER = ("add_bias_linear", "clamp_temp", "rope_scaling", "use_lora_att")
_ROLES = (
    (r"^qkv_proj\.q_proj\.", "qkv.linear_q."),
    (r"^qkv_proj\.k_proj\.", "qkv.linear_k."),
    (r"^qkv_proj\.v_proj_current\.", "qkv.val_proj1."),
    (r"^qkv_proj\.v_proj_delayed\.", "qkv.val_proj2."),
    (r"^qkv_proj\.conv_qk_depthwise\.", "qkv.conv_qk.0."),
    (r"^qkv_proj\.conv_qk_grouped\.", "qkv.conv_qk.1."),
    (r"^qk_norm\.temp$", "qkv.temp"),
    (r"^router\.router_mlp\.norm\.", "router.rmsnorm_eda."),
    (r"^router\.router_mlp\.fc1\.", "router.router_mlp.0."),
    (r"^router\.router_mlp\.fc2\.", "router.router_mlp.2."),
    (r"^router\.router_mlp\.out_proj\.", "router.router_mlp.4."),
)
# Of an expert's weights: the tensor, and which part of how many.
_EXPERTS = {
    "gate_proj": ("linear_fc1", 0, 2), "up_proj": ("linear_fc1", 1, 2),
    "down_proj": ("linear_fc2", 0, 1),
}  # fmt: skip


def is_legacy(raw: RawConfig) -> bool:
    """Whether a configuration is of this form."""
    return "cca" in raw.values or "zaya_layers" in raw.values


def renamed(raw: RawConfig) -> RawConfig:
    """The same by transformers' names. Raises ConfigurationError for what these cannot say."""
    for name in _ALWAYS:
        raw.refuse_unless(name, True)
    for name in _NEVER:
        raw.refuse_unless(name, False)
    raw.refuse_unless("activation_func", "swiglu")
    raw.refuse_unless("normalization", "RMSNorm")
    if raw.get("zaya_layers") is None:
        count = raw.whole("num_hidden_layers")
        kinds = ["a", raw.whole("num_experts")] * (count // 2)
    else:
        kinds = raw.listed("zaya_layers", of=object)
        count = len(kinds)
    experts = kinds[1] if count > 1 else None
    if kinds != ["a", experts] * (count // 2) or not isinstance(experts, int):
        raise ConfigurationError(
            f'The {count} layers that {raw.where} describes must be attention ("a") and equally '
            "many experts in turn."
        )
    windows = raw.listed("swa_layers", default=[0], of=int)
    partial = raw.number("partial_rotary_factor", "rope_pct", default=0.5)
    theta = raw.number("rope_theta", "rotary_base", default=1e6)
    values: dict[str, Any] = {
        "model_type": LEGACY,
        "num_hidden_layers": count // 2,
        "num_attention_heads": _of_layers(raw, "cca_num_q_heads", "num_attention_heads"),
        "num_key_value_heads": _of_layers(raw, "num_query_groups_list", "num_query_groups"),
        "head_dim": raw.whole("head_dim", "kv_channels"),
        "num_experts": experts,
        "num_experts_per_tok": raw.whole("moe_router_topk", default=1),
        "moe_intermediate_size": _of_layers(raw, "ffn_hidden_size_list", "ffn_hidden_size") // 2,
        "router_hidden_size": _of_layers(raw, "zaya_mlp_expansion"),
        "rms_norm_eps": raw.number("norm_epsilon", default=1e-5),
        # a token sees so many before it, and itself
        "sliding_window": max(windows, default=0) + 1,
        "layer_types": ["hybrid_sliding" if w else "hybrid" for w in (windows * count)[:count:2]],
        "rope_parameters": {
            "hybrid": {"rope_theta": theta, "partial_rotary_factor": partial},
            "hybrid_sliding": {
                "rope_theta": raw.number("swa_rotary_base", default=theta),
                "partial_rotary_factor": partial,
            },
        },
    }
    return replace(raw, values={**raw.values, **values})


def _of_layers(raw: RawConfig, *names: str) -> int:
    """A number that is the same in all layers that have it; lists have 0 for the others."""
    said = raw.require(*names)
    each = raw.listed(*names, of=int) if isinstance(said, list) else [raw.whole(*names)]
    found = set(each) - {0}
    if len(found) != 1:
        raise ConfigurationError(
            f"{names[0]} in {raw.where} must be the same in all layers; it is {said}."
        )
    return found.pop()


def locate(config: HybridModelConfig, block: int, role: str) -> list[Location]:
    """As in Family. What is added to a sum in front of a layer is said in that layer, or behind the
    last one."""
    layer = f"model.layers.{block}"
    kind, _, name = role.partition(".")
    if kind == "embedding_norm":
        return [Location(f"model.layers.0.res_scale.hidden_states_{name}")]
    if kind == "scaling":
        is_last = block + 1 == len(config.pattern)
        place = "model" if is_last else f"model.layers.{block + 1}"
        return [Location(f"{place}.res_scale.{name}")]
    if kind == "norm":
        return [Location(f"{layer}.input_norm.{name}")]
    for pattern, replacement in _ROLES:
        name = re.sub(pattern, replacement, name)
    if config.letter(block) != EXPERTS:
        return [Location(f"{layer}.self_attn.{name}")]
    if expert := re.fullmatch(r"experts\.(\d+)\.(\w+)\.(\w+)", name):
        tensor, part, parts = _EXPERTS[expert[2]]
        name = f"experts.local_experts.{expert[1]}.{tensor}.{expert[3]}"
        return [Location(f"{layer}.zaya_block.{name}", part=part, parts=parts)]
    return [Location(f"{layer}.zaya_block.{name}")]
