"""MiniMax-Text-01 and MiniMax-M1: lightning attention, every few layers softmax attention, each
with experts. Sums start from the norm in front of a layer, not from what it is the norm of."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.lightning_attention import LightningAttentionConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.config import (
    ATTENTION,
    LIGHTNING_ATTENTION,
    BlockForm,
    HybridModelConfig,
)
from megatron_hybrid.models.families.family import TwoBlockFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_LIGHTNING_EPS = 1e-6  # of their own norm, whatever config.json says of the others
_SMALL = 1e-5  # so that no layer's decay is 0


class MiniMax(TwoBlockFamily):
    """Of experts its checkpoints have Mixtral's names. The first releases' model types have other
    names for the factors of sums, and list the layers by number."""

    model_types = ("minimax", "minimax_text_01", "minimax_m1")
    renames = ((r"\.block_sparse_moe\.", ".mlp."),)
    roles = (
        (r"\bgate_proj\.", "w1."),
        (r"\bup_proj\.", "w3."),
        (r"\bdown_proj\.", "w2."),
        (r"^router\.", "gate."),
        (r"^in_proj_qkv\.", "qkv_proj."),
        (r"^in_proj_gate\.", "output_gate."),
    )
    # Tables that transformers keeps of what follows from the numbers of heads and layers.
    ignored = (
        *TwoBlockFamily.ignored,
        r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",
    )
    recurrent = "self_attn"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        raw.refuse_unless("sliding_window")
        raw.refuse_unless("attention_bias", False)
        raw.refuse_unless("postnorm", True)
        raw.refuse_unless("shared_intermediate_size", 0)
        if raw.model_type != "minimax" and raw.get("postnorm") is None:
            raise ConfigurationError(raw.missing("postnorm"))
        letters = self._letters(raw)
        attention = raw.attention(bias=False)
        rope = raw.rope(attention.head_dim, theta=1e6)
        rotary_dim = raw.whole("rotary_dim", default=rope.rotary_dim)
        if rotary_dim % 2 or not 0 < rotary_dim <= attention.head_dim:
            raise ConfigurationError(
                f"rotary_dim = {rotary_dim} in {raw.where}; it must be an even number of the "
                f"{attention.head_dim} numbers of a head."
            )
        rope = replace(rope, rotary_dim=rotary_dim)
        return HybridModelConfig(
            **raw.common(max_positions=131072),
            pattern="".join(letter + "E" for letter in letters),
            forms=self._forms(raw, letters),
            norm_eps=raw.number("rms_norm_eps", default=1e-5),
            attention=replace(attention, rope=rope),
            moe=MoEConfig(
                num_experts=raw.whole("num_local_experts", default=8),
                experts_per_token=raw.whole("num_experts_per_tok", default=2),
                expert=raw.gated_mlp(),
                shared=None,
            ),
            others={LIGHTNING_ATTENTION: self._lightning(raw, attention.head_dim, len(letters))},
        )

    def _letters(self, raw: RawConfig) -> str:
        numbers = raw.listed("attn_type_list", "decoder_attention_types", default=[], of=int)
        if raw.get("layer_types") is None and numbers:
            raw = replace(raw, values={"layer_types": list(map(str, numbers))})
        letters = raw.layer_letters({"linear_attention": LIGHTNING_ATTENTION, "0": "N", "1": "*"})
        if letters is not None:
            return letters
        return "".join("N" if i % 2 else "*" for i in range(raw.whole("num_hidden_layers")))

    def _forms(self, raw: RawConfig, letters: str) -> tuple[BlockForm, ...]:
        def form(new: str, old: str) -> BlockForm:
            alpha = f"{new}_alpha_factor", f"layernorm_{old}_alpha"
            beta = f"{new}_beta_factor", f"layernorm_{old}_beta"
            return BlockForm(
                from_norm=True,
                stream_multiplier=raw.positive(*alpha, default=1.0),
                multiplier=raw.number(*beta, default=1.0),
            )

        full, linear = form("full_attn", "full_attention"), form("linear_attn", "linear_attention")
        mlp = form("mlp", "mlp")
        firsts = (full if letter == ATTENTION else linear for letter in letters)
        return tuple(one for first in firsts for one in (first, mlp))

    def _lightning(self, raw: RawConfig, head_dim: int, layers: int) -> LightningAttentionConfig:
        heads = raw.whole("num_attention_heads")
        factors = (1 - layer / (layers - 1 + _SMALL) + _SMALL for layer in range(layers))
        return LightningAttentionConfig(
            num_heads=heads,
            head_dim=head_dim,
            slopes=tuple(2.0 ** (-8 * (head + 1) / heads) for head in range(heads)),
            factors=tuple(factor for factor in factors for _ in range(2)),
            norm_groups=1,
            norm_eps=_LIGHTNING_EPS,
            kernel_chunk=raw.whole("block_size", default=256),
            silu=True,
            by_heads=True,
        )
