"""RWKV-4: time mixing and channel mixing in turn, with layer norms, the first of them of the
embeddings (Peng et al., 2023, arXiv 2305.13048)."""

from __future__ import annotations

from megatron_hybrid.layers.rwkv import ChannelMixConfig, TimeMixConfig
from megatron_hybrid.models.config import CHANNEL_MIX, TIME_MIX, HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

_NORMS = {"norm": ("ln1", "ln2"), "embedding_norm": ("pre_ln",)}


class Rwkv(Family):
    """A layer of Hugging Face's is two blocks. What transformers divides by 2 every few layers, so
    that float16 holds it, stays as it is: the residual stream is in float32, and norms have the eps
    that makes the same of it."""

    model_types = ("rwkv",)
    embedding = "rwkv.embeddings.weight"
    final_norm = "rwkv.ln_out.weight"
    lm_head = "head.weight"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("layer_norm_epsilon", 1e-5)  # the last norm has no other
        hidden = raw.whole("hidden_size")
        size = raw.whole("intermediate_size", default=4 * hidden)
        common = raw.common()
        length = raw.whole("context_length", "max_position_embeddings", default=1024)
        return HybridModelConfig(
            **common | {"max_position_embeddings": length},
            pattern=(TIME_MIX + CHANNEL_MIX) * raw.whole("num_hidden_layers"),
            norm_eps=1e-5,
            layer_norm=True,
            embedding_norm=True,
            residual_in_fp32=True,
            halved_every=2 * raw.whole("rescale_every", default=6, least=0),
            others={
                TIME_MIX: TimeMixConfig(raw.whole("attention_hidden_size", default=hidden)),
                CHANNEL_MIX: ChannelMixConfig(size),
            },
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        layer, second = f"rwkv.blocks.{block // 2}", block % 2
        kind, _, name = role.partition(".")
        if kind == "mixer":
            mixer = "feed_forward" if second else "attention"
            return [Location(f"{layer}.{mixer}.{name.replace('time_key.', 'key.')}")]
        return [Location(f"{layer}.{_NORMS[kind][second]}.{name}")]
