"""Qwen4-Exp (Alibaba): gated delta nets, every few layers gated attention of which an index chooses
what a token sees, experts in every layer; all on several residual streams, into which some layers
add embeddings of n-grams first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import IndexShape
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.indexed_attention import IndexedAttentionConfig
from megatron_hybrid.layers.mixer import LayerConfig
from megatron_hybrid.layers.ngram_embedding import NGramEmbeddingConfig
from megatron_hybrid.layers.ngram_hash import NGramHashes
from megatron_hybrid.layers.streams import GatedStreamsConfig
from megatron_hybrid.models.config import (
    EXPERTS,
    GATED_DELTA_NET,
    INDEXED_ATTENTION,
    NGRAM_EMBEDDING,
    HybridModelConfig,
    MTPConfig,
)
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.families.qwen3_next import Qwen3Next
from megatron_hybrid.models.families.raw_config import RawConfig

# The checkpoint's attention layers all have an index, whatever they are called.
LAYERS = {
    "linear_attention": GATED_DELTA_NET,
    "full_attention": INDEXED_ATTENTION,
    "indexed_attention": INDEXED_ATTENTION,
}
_OF_STREAMS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_OF_NGRAMS = (
    (r"^table\.", "ple_embedding.ngram_embedding."),
    (r"^short_conv\.", "conv1d."),
)
# What hashes are made of, which a checkpoint may hold.
_CONSTANTS = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"


class Qwen4Exp(Qwen3Next):
    """A layer is up to three blocks: embeddings of n-grams, a delta net or attention, experts."""

    model_types = ("qwen4_exp_text",)
    ignored = (*Qwen3Next.ignored, rf"\.ple\.ple_embedding\.(?:{'|'.join(_CONSTANTS)})$")
    head_mixer = "model.hyper_connection_mixer"

    def config(self, raw: RawConfig) -> HybridModelConfig:
        raw.refuse_unless("hidden_act", "silu")
        layers, ngrams = self._layers(raw), self._ngram_layers(raw)
        pattern = "".join(
            NGRAM_EMBEDDING * (i in ngrams) + letter + EXPERTS for i, letter in enumerate(layers)
        )
        if wrong := [i + 1 for i in sorted(ngrams) if layers[i : i + 1] != GATED_DELTA_NET]:
            raise ConfigurationError(
                f"ple_layer_ids in {raw.where} must name linear_attention layers, counted from 1; "
                f"layer {wrong[0]} is none."
            )
        if (streams := raw.whole("hc_count", default=4)) < 2:
            raise ConfigurationError(
                f"hc_count in {raw.where} is {streams}; a model has two residual streams at least."
            )
        others: dict[str, LayerConfig] = {}
        if INDEXED_ATTENTION in pattern:
            others[INDEXED_ATTENTION] = self._attention(raw)
        if ngrams:
            blocks = tuple(i for i, letter in enumerate(pattern) if letter == NGRAM_EMBEDDING)
            others[NGRAM_EMBEDDING] = self._ngrams(raw, blocks, streams)
        return HybridModelConfig(
            **raw.common(max_positions=32768),
            pattern=pattern,
            norm_eps=raw.number("rms_norm_eps", default=1e-6),
            zero_centered_norm=True,
            gated_delta_net=self._delta_net(raw),
            moe=self._moe(raw),
            others=others,
            streams=GatedStreamsConfig(streams, raw.whole("hc_lowrank", default=320)),
            mtp=self._mtp(raw, 0),
        )

    def _layers(self, raw: RawConfig) -> str:
        """A letter for each Hugging Face layer."""
        every = raw.whole("full_attention_interval", default=4)
        return raw.layer_letters(LAYERS, ("layer_types",)) or "".join(
            INDEXED_ATTENTION if i % every == 0 else GATED_DELTA_NET
            for i in range(1, raw.whole("num_hidden_layers") + 1)
        )

    def _ngram_layers(self, raw: RawConfig) -> set[int]:
        return {i - 1 for i in raw.listed("ple_layer_ids", default=[], of=int)}

    def _delta_net(self, raw: RawConfig) -> GatedDeltaNetConfig:
        raw.refuse_unless("output_gate_type", "silu", "sigmoid")
        return GatedDeltaNetConfig(
            key_heads=raw.whole("linear_num_key_heads", default=16),
            value_heads=raw.whole("linear_num_value_heads", default=32),
            key_dim=raw.whole("linear_key_head_dim", default=128),
            value_dim=raw.whole("linear_value_head_dim", default=128),
            conv_width=raw.whole("linear_conv_kernel_dim", default=4),
            kernel_chunk=raw.whole("chunk_size", default=64),
            gate_activation=raw.get("output_gate_type", default="silu"),
        )

    def _attention(self, raw: RawConfig) -> IndexedAttentionConfig:
        raw.refuse_unless("indexer_kv_heads", 1)
        own = raw.attention(raw.whole("head_dim", default=256), qk_norm=True)
        rope = raw.rope(own.head_dim, 1.0)
        budget, group = raw.whole("indexer_budget"), raw.whole("indexer_compress_ratio")
        dim = raw.whole("indexer_head_dim")
        if budget % group:
            raise ConfigurationError(
                f"indexer_budget in {raw.where} is {budget}; it must be a multiple of "
                f"indexer_compress_ratio, {group}."
            )
        if rope.rotary_dim > dim:
            raise ConfigurationError(
                f"indexer_head_dim in {raw.where} is {dim}; it must be at least the "
                f"{rope.rotary_dim} numbers of a head that are rotated."
            )
        return IndexedAttentionConfig(
            own.num_heads,
            own.num_kv_heads,
            own.head_dim,
            own.scale,
            rope=rope,
            qkv_bias=own.qkv_bias,
            output_bias=own.output_bias,
            qk_norm=True,
            zero_centered_norm=True,
            output_gate=True,
            index=IndexShape(raw.whole("indexer_n_heads"), dim, group, budget // group),
        )

    def _ngrams(
        self, raw: RawConfig, blocks: tuple[int, ...], streams: int
    ) -> NGramEmbeddingConfig:
        if raw.get("eos_token_id") in (None, []):
            raise ConfigurationError(raw.missing("eos_token_id"))
        size = raw.whole("ngram_size", default=3)
        heads = raw.whole("heads_per_ngram", default=8)
        width = raw.whole("ple_embed_dim", default=raw.whole("hidden_size"))
        each = (size - 1) * heads
        if each < 1 or width % each:
            raise ConfigurationError(
                f"ple_embed_dim in {raw.where} is {width}, which {each} heads "
                "(ngram_size - 1 times heads_per_ngram) do not share evenly."
            )
        return NGramEmbeddingConfig(
            blocks,
            NGramHashes(
                0, size, heads,
                least_rows=raw.whole("ngram_vocab_size_base", default=20_000_000),
                vocab_size=raw.whole("vocab_size"),
                seed=raw.whole("seed", default=1234, least=0),
                end=raw.eos_token_ids[0],
            ),
            streams=streams,
            embedding_size=width,
            conv_width=raw.whole("ple_conv_kernel_size", default=4),
            rows_multiple=raw.whole("make_ngram_vocab_size_divisible_by", default=128),
            shards=raw.whole("split_ngram_parts", default=512),
        )  # fmt: skip

    def _mtp(self, raw: RawConfig, experts: int) -> MTPConfig | None:
        if not raw.whole("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, least=0):
            return None
        return MTPConfig(
            "",
            f"The head that {raw.where} describes works on residual streams, from which no drafts "
            "come yet.",
        )

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        if block is None and (inner := role.removeprefix("final_norm.")) != role:
            return [Location(f"{self.head_mixer}.{_OF_STREAMS[inner]}.weight")]
        return super().places(config, block, role)

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        letter, number = config.pattern[block], config.pattern[:block].count(EXPERTS)
        layer = f"model.layers.{number}"
        if (inner := role.removeprefix("streams.")) != role:
            kind = "mlp" if letter == EXPERTS else "attn"
            name = _OF_STREAMS[inner.removesuffix(".weight")]
            return [Location(f"{layer}.{kind}_hyper_connection.{name}.weight")]
        inner = role.removeprefix("mixer.")
        if letter == INDEXED_ATTENTION:
            return [Location(f"{layer}.self_attn.{inner}")]
        if letter != NGRAM_EMBEDDING:
            return self.locate_in(config, layer, block, role)
        for pattern, name in _OF_NGRAMS:
            inner = re.sub(pattern, name, inner)
        places = [Location(f"{layer}.ple.{inner}")]
        if shard := re.search(r"shard_(\d+)\.weight$", inner):  # or all of them in one
            scale = f"{layer}.ple.{inner.replace(shard[0], 'weight_scale')}"
            ngrams = config.others[NGRAM_EMBEDDING]
            assert isinstance(ngrams, NGramEmbeddingConfig)
            rows = ngrams.table_rows(block)
            first = int(shard[1]) * math.ceil(rows / ngrams.shards)
            whole = f"{layer}.ple.{inner.replace(shard[0], 'weight')}"
            places.append(Location(whole, first=first, total=rows))
            places = [replace(place, scale=scale) for place in places]
        return places

    def constants(self, config: HybridModelConfig) -> Mapping[str, Tensor]:
        ngrams, found = config.others.get(NGRAM_EMBEDDING), {}
        if isinstance(ngrams, NGramEmbeddingConfig):
            for block in ngrams.blocks:
                layer = config.pattern[:block].count(EXPERTS)
                kinds = ngrams.hashes_of(block).constants(torch.device("cpu"))
                for name, values in zip(_CONSTANTS, kinds, strict=True):
                    found[f"model.layers.{layer}.ple.ple_embedding.{name}"] = values
        return found
