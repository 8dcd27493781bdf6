"""Zamba2 (Zyphra): Mamba2 layers; to the input of some a shared transformer block adds."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.shared_transformer import SharedTransformerConfig
from megatron_hybrid.models.config import SHARED_TRANSFORMER, HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import MAMBA2_LAYERS, RawConfig


class Zamba2(Family):
    """Blocks that share a transformer have adapters of their own in it."""

    model_types: ClassVar[tuple[str, ...]] = ("zamba2",)
    shared: ClassVar[str] = "shared_transformer"
    joins_gates: ClassVar[bool] = True  # with the up projections, in one tensor
    roles = (
        (r"^transformer\.input_norm\.", "input_layernorm."),
        (r"^transformer\.mlp_norm\.", "pre_ff_layernorm."),
        (r"^transformer\.mlp\.", "feed_forward."),
        (r"^transformer\.", ""),
        (r"\b([qkv])_adapter\.", r"linear_\1_adapter_list.{use}."),
        (r"\badapter\.", "gate_up_proj_adapter_list.{use}."),
        (r"\.down$", ".0.weight"),
        (r"\.up$", ".1.weight"),
    )
    final_norm = "model.final_layernorm.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "gelu", "silu")
        raw.refuse_unless("add_bias_linear", False)
        raw.refuse_unless("use_long_context", False)
        letters = raw.layer_letters({**MAMBA2_LAYERS, "hybrid": "Z"})
        if letters is None:
            raise ConfigurationError(f"{raw.where} has no layers_block_type.")
        hidden, heads = raw.whole("hidden_size"), raw.whole("num_attention_heads")
        head_dim = raw.whole("attention_head_dim", default=2 * hidden // heads)
        attention = raw.attention(head_dim, bias=False)
        rope = raw.rope(head_dim) if raw.flag("use_mem_rope") else None
        adapters = raw.flag("use_shared_attention_adapter")
        if adapters and heads != attention.num_kv_heads:
            raise ConfigurationError(
                f"use_shared_attention_adapter with {attention.num_kv_heads} KV heads for {heads} "
                "heads in "
                f"{raw.where} is not supported: their numbers must be equal."
            )
        mamba_heads = raw.whole("n_mamba_heads", default=8)
        mamba_dim = int(raw.number("mamba_expand", default=2) * hidden) // mamba_heads
        raw.refuse_unless("mamba_headdim", mamba_dim)
        uses = [i for i, letter in enumerate(letters) if letter == SHARED_TRANSFORMER]
        raw.refuse_unless("hybrid_layer_ids", uses)
        size = raw.whole("intermediate_size", default=4 * hidden)
        activation = raw.get("hidden_act", default="gelu")
        # As transformers does: time_step_min bounds the step sizes.
        least = raw.number("time_step_min", default=0.001)
        return HybridModelConfig(
            **raw.common(tied=True),
            pattern=letters,
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            mamba=Mamba2Config(
                num_heads=mamba_heads,
                head_dim=mamba_dim,
                state_size=raw.whole("mamba_d_state", default=64),
                num_groups=raw.whole("mamba_ngroups", default=1),
                conv_width=raw.whole("mamba_d_conv", default=4),
                kernel_chunk=raw.whole("chunk_size", default=256),
                dt_limit=(least, float("inf")),
                norm_eps=1e-5,
            ),
            shared_transformer=SharedTransformerConfig(
                attention=replace(attention, scale=(head_dim / 2) ** -0.5, rope=rope),
                mlp=MLPConfig(size, gated=True, activation=activation),
                num_blocks=raw.whole("num_mem_blocks", default=1),
                adapter_rank=raw.whole("adapter_rank", default=128),
                attention_adapters=adapters,
            ),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer = f"model.layers.{block}"
        if role.startswith("transformer."):
            return self._locate_shared(config, block, self.name_of(role))
        if config.pattern[block] == SHARED_TRANSFORMER:
            layer += ".mamba_decoder"
        if role == "norm.weight":
            return [Location(f"{layer}.input_layernorm.weight")]
        return [Location(f"{layer}.mamba.{self.name_of(role)}")]

    def _locate_shared(self, config: HybridModelConfig, block: int, name: str) -> list[Location]:
        if name == "linear.weight":
            return [Location(f"model.layers.{block}.{name}")]
        assert config.shared_transformer is not None
        uses = [i for i, letter in enumerate(config.pattern) if letter == SHARED_TRANSFORMER]
        number, cycle = uses.index(block), config.shared_transformer.num_blocks
        part, parts = 0, 1
        for index, half in enumerate(("feed_forward.gate_proj", "feed_forward.up_proj")):
            if name.startswith(half) and self.joins_gates:
                name, part, parts = "feed_forward.gate_up_proj.weight", index, 2
        name = f"{self.shared}.{name.format(use=number)}"
        # Under the first layer that uses the block, or under each of them.
        same = [use for i, use in enumerate(uses) if i % cycle == number % cycle]
        return [Location(f"model.layers.{use}.{name}", part=part, parts=parts) for use in same]
