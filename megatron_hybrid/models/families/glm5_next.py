"""GLM-5.3 (Zhipu AI): Kimi delta attention, every few layers latent attention without positions of
which an index chooses what a token sees, each with an MLP or, past the first layers, experts; and
several residual streams."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import IndexShape
from megatron_hybrid.layers.indexed_latent_attention import IndexedLatentConfig
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.streams import BalancedStreamsConfig
from megatron_hybrid.models.config import (
    INDEXED_LATENT_ATTENTION,
    KIMI_DELTA_ATTENTION,
    SHARED_INDEX,
    HybridModelConfig,
)
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.kimi_linear import LatentFamily
from megatron_hybrid.models.families.raw_config import RawConfig

_LAYERS = {
    "linear_attention": KIMI_DELTA_ATTENTION,
    "indexed_attention": INDEXED_LATENT_ATTENTION,
    "full_attention": INDEXED_LATENT_ATTENTION,
}
_INDEXERS = {"full": INDEXED_LATENT_ATTENTION, "shared": SHARED_INDEX}
_EPS = 1e-5


class Glm5Next(LatentFamily):
    """The text part of such a model, which also sees."""

    model_types = ("glm5_next_text",)
    renames = (
        (r"\.forget_gate\.", "."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    )
    roles: ClassVar[tuple[tuple[str, str], ...]] = (
        *LatentFamily.roles,
        (r"^(indexer\.index_kpool_compress_gate)\.weight$", r"\1"),
    )
    dense_layers = 3
    scaling_factor = 2.5

    def locate_in(
        self, config: HybridModelConfig, layer: str, block: int, role: str
    ) -> list[Location]:
        if role.startswith("streams."):
            kind = "ffn" if block % 2 else "attn"
            return [Location(f"{layer}.hc_{kind}_{role.removeprefix('streams.')}")]
        return super().locate_in(config, layer, block, role)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("qk_rope_head_dim", 0)
        values = {"qk_rope_head_dim": 0, **raw.values}
        raw = replace(raw, values={**values, "num_key_value_heads": self._kv_heads(raw)})
        latent, delta = self._latent(raw), self._delta(raw)
        built = self.built(raw, self._layers(raw), latent, delta, _EPS)
        limit = raw.positive("swiglu_limit", default=10.0)
        moe = built.moe
        if moe is not None:
            expert, shared = _limited(moe.expert, limit), _limited(moe.shared, limit)
            assert expert is not None
            moe = replace(moe, expert=expert, shared=shared)
        return replace(
            built,
            others={
                KIMI_DELTA_ATTENTION: delta,
                INDEXED_LATENT_ATTENTION: latent,
                SHARED_INDEX: replace(latent, shared=True),
            },
            mlp=_limited(built.mlp, limit),
            moe=moe,
            streams=BalancedStreamsConfig(
                count=raw.whole("hc_mult", default=4),
                iterations=raw.whole("hc_sinkhorn_iters", default=20),
                eps=raw.number("hc_eps", default=1e-6),
            ),
        )

    def _kv_heads(self, raw: RawConfig) -> int:
        return raw.whole("num_key_value_heads", default=raw.whole("num_attention_heads"))

    def _latent(self, raw: RawConfig) -> IndexedLatentConfig:
        if raw.get("q_lora_rank") is None:
            raise ConfigurationError(
                f"{raw.where} has no q_lora_rank: the index makes its queries of that latent."
            )
        plain = self.latent_attention(raw, None, raw.flag("attention_bias"))
        group, budget = raw.whole("index_kpool", default=16), raw.whole("index_topk", default=2048)
        if budget % group:
            raise ConfigurationError(
                f"index_topk in {raw.where} is {budget}, but must be a multiple of index_kpool, "
                f"which is {group}."
            )
        if group > 1 and not raw.flag("index_kpool_always_select_tail", default=True):
            raise ConfigurationError(
                f"index_kpool_always_select_tail in {raw.where} is false, which is not supported: "
                f"the first {group - 1} tokens of a text would see nothing."
            )
        index = IndexShape(
            heads=raw.whole("index_n_heads", default=32),
            dim=raw.whole("index_head_dim", default=128),
            group=group,
            chosen=budget // group,
        )
        said = {one.name: getattr(plain, one.name) for one in fields(plain)}
        eps = raw.number("rms_norm_eps", default=_EPS)
        return IndexedLatentConfig(**{**said, "norm_eps": eps}, index=index)

    def _delta(self, raw: RawConfig) -> KimiDeltaAttentionConfig:
        said = raw.inside("linear_attn_config")
        dim = said.whole("head_dim", default=raw.whole("linear_head_dim", default=128))
        has_own = "gate_lower_bound" in said.values
        place, name = (said, "gate_lower_bound") if has_own else (raw, "linear_lower_bound")
        bound: float | None = place.number(name, default=-5.0)
        if place.values.get(name, bound) is None:  # null, and not only left out
            is_safe = said.values and said.flag("safe_gate", default=True)
            bound = bound if is_safe else None
        return KimiDeltaAttentionConfig(
            num_heads=said.whole("num_heads", default=raw.whole("linear_num_heads", default=64)),
            head_dim=dim,
            conv_width=said.whole(
                "short_conv_kernel_size", default=raw.whole("linear_conv_kernel_dim", default=4)
            ),
            gate_rank=dim,
            lower_bound=bound,
            kernel_chunk=raw.whole("chunk_size", default=64),
        )

    def _layers(self, raw: RawConfig) -> str:
        """A letter for each Hugging Face layer."""
        count = raw.whole("num_hidden_layers")
        letters = raw.layer_letters(_LAYERS, ("layer_types",))
        if letters is None:
            letters = "".join(
                INDEXED_LATENT_ATTENTION if i % 4 == 3 else KIMI_DELTA_ATTENTION
                for i in range(count)
            )
        indexers = self._indexers(raw, count)
        unknown = [name for name in indexers if name not in _INDEXERS]
        if unknown or len(indexers) != count or len(letters) != count:
            raise ConfigurationError(
                f"layer_types and indexer_types in {raw.where} must have a type for each of the "
                f"model's {count} layers, the latter 'full' or 'shared'; they have {len(letters)} "
                f"and {indexers}."
            )
        found = "".join(
            letter if letter == KIMI_DELTA_ATTENTION else _INDEXERS[indexer]
            for letter, indexer in zip(letters, indexers, strict=True)
        )
        first = found.strip(KIMI_DELTA_ATTENTION)[:1]
        if first == SHARED_INDEX:
            raise ConfigurationError(
                f"indexer_types in {raw.where} has the first layer with attention share an index, "
                "but no layer before it has one."
            )
        return found

    def _indexers(self, raw: RawConfig, count: int) -> list[str]:
        """A name for each layer, of which those of layers without attention mean nothing."""
        if raw.get("indexer_types") is not None:
            return raw.listed("indexer_types")
        pattern = raw.get("index_topk_pattern")
        if pattern is not None:  # "FSSF", or a list
            names = {"F": "full", "S": "shared"}
            letters = pattern if isinstance(pattern, str) else raw.listed("index_topk_pattern")
            return [names.get(one, one) for one in letters]
        every = max(raw.whole("index_topk_freq", default=1, least=0), 1)
        offset = raw.whole("index_skip_topk_offset", default=2, least=0)
        return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]


def _limited(mlp: MLPConfig | None, limit: float) -> MLPConfig | None:
    """With gates of at most that, and what they are multiplied with of as much either way."""
    return None if mlp is None else replace(mlp, activation=f"silu_to_{limit!r}")
