"""Where Megatron keeps our weights: a role of a block is rows of one or several of its tensors.

Names are those of megatron-core's sharded_state_dict (0.16 to 0.19), which are the same for any
number of ranks. Two models have them: HybridModel (formerly MambaModel), whose layers are our
blocks, and GPTModel, whose layers are two of our blocks each, a mixer and an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.models.config import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    GATED_DELTA_NET,
    MAMBA,
    HybridModelConfig,
)

# Tensors in a checkpoint that are no weights of the model that is served.
_IGNORED = (
    r"^(chained_\d+\.)?optimizer\.",
    r"^(rng_state|rerun_state_machine_state|opt_param_scheduler)",
    r"^mtp\.",  # multi-token prediction
    r"\b_extra_state\b",
    r"(local|global)_tokens_per_expert$",
    r"rotary_pos_emb\.inv_freq$",
)
HEAD = "output_layer.weight"
HYBRID_NORM, GPT_NORM = "decoder.final_norm.weight", "decoder.final_layernorm.weight"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, start + count) of the tensor `name`, all of it where `count` is None.

    `lead` is (index, size) in each dimension that Megatron puts before those of the weight: layers
    and experts that are stacked. `offset` is to be added to what is stored.
    """

    name: str
    start: int = 0
    count: int | None = None
    lead: tuple[tuple[int, int], ...] = ()
    offset: float = 0.0


class Role(NamedTuple):
    """A weight of block `block` (None: of none), and the rows that make it up, in order."""

    block: int | None
    role: str
    rows: list[Rows]


class MegatronNames:
    """All roles of a model. `stored` (name -> shape) tells the variants of the format apart; None:
    the variant that we write."""

    def __init__(
        self,
        config: HybridModelConfig,
        stored: Mapping[str, tuple[int, ...]] | None = None,
        *,
        zero_centered: bool | None = None,
        some: bool = False,
    ) -> None:
        """`zero_centered`: whether the checkpoint has weight - 1 of its norms; None: as the model
        does. `some`: `stored` may be a part of the model's."""
        self.config = config
        self.stored = stored
        self.zero_centered = config.zero_centered_norm if zero_centered is None else zero_centered
        if stored is None or some:
            self.is_gpt = is_gpt_pattern(config.pattern) and HYBRID_NORM not in (stored or ())
        else:
            self.is_gpt = GPT_NORM in stored
        if self.is_gpt and not is_gpt_pattern(config.pattern):
            raise ConfigurationError(
                f"A checkpoint of Megatron's GPTModel has layers of a mixer and an MLP each, which "
                f"the layer pattern {config.pattern!r} does not have."
            )
        # Layers of one kind are one tensor in GPTModel's older checkpoints.
        self.stacks_layers = not (stored is None or some) and not any(
            re.match(r"decoder\.layers\.\d", name) for name in stored
        )
        self.per_layer = 2 if self.is_gpt else 1

    def ignores(self, name: str) -> bool:
        """Whether a stored tensor is none of the model's."""
        return any(re.search(pattern, name) for pattern in _IGNORED)

    def roles(self) -> Iterator[Role]:
        """Of blocks in order, those outside of blocks around them."""
        config = self.config
        vocab = config.vocab_size  # the rest is padding
        yield Role(None, "embedding", [Rows("embedding.word_embeddings.weight", 0, vocab)])
        for block, letter in enumerate(config.pattern):
            for role, rows in self._block(block, letter):
                yield Role(block, role, rows)
        norm = GPT_NORM if self.is_gpt else HYBRID_NORM
        yield Role(None, "final_norm", [self._norm(norm, config.zero_centered_norm)])
        if not config.tie_word_embeddings:
            yield Role(None, "lm_head", [Rows(HEAD, 0, vocab)])

    def _block(self, block: int, letter: str) -> Iterator[tuple[str, list[Rows]]]:
        config, layer = self.config, _Layer(self, block // self.per_layer)
        norms, parts = _KINDS[letter]
        found = next((norm for norm in norms if layer.has(norm)), norms[0])
        centered = config.zero_centered_norm
        yield "norm.weight", [layer.at(self._norm(found, centered))]
        for role, rows in parts(self, layer):
            yield f"mixer.{role}", [layer.at(one) for one in rows]

    def _norm(self, name: str, role_is_centered: bool) -> Rows:
        return Rows(name, offset=float(self.zero_centered - role_is_centered))

    def attention(self, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
        """linear_qkv goes from KV head to KV head: its queries, their gates, its key, its value."""
        config = self.config.attention
        assert config is not None
        kinds = ["weight"] + (["bias"] if config.qkv_bias else [])
        for kind in kinds:
            yield from _qkv(config, f"self_attention.linear_qkv.{kind}", kind)
        yield "o_proj.weight", [Rows("self_attention.linear_proj.weight")]
        if config.output_bias:
            yield "o_proj.bias", [Rows("self_attention.linear_proj.bias")]
        if config.qk_norm:
            for name in "qk":
                norm = f"self_attention.{name}_layernorm.weight"
                yield f"{name}_norm.weight", [self._norm(norm, config.zero_centered_norm)]

    def mamba(self, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
        """in_proj and conv1d are a tensor for each of their sections."""
        config = self.config.mamba
        assert config is not None
        inner, groups = config.inner_size, config.num_groups * config.state_size
        sizes = {"z": inner, "x": inner, "B": groups, "C": groups, "dt": config.num_heads}
        yield "in_proj.weight", _sections("mixer.in_proj.weight", sizes, sizes)
        for kind in ("weight", "bias") if config.conv_bias else ("weight",):
            yield f"conv1d.{kind}", _sections(f"mixer.conv1d.{kind}", sizes, "xBC")
        for name in ("dt_bias", "A_log", "D"):
            yield name, [Rows(f"mixer.{name}", 0, config.num_heads)]
        if config.norm != "none":
            yield "norm.weight", [Rows("mixer.norm.weight")]
        yield "out_proj.weight", [Rows("mixer.out_proj.weight")]

    def gated_delta_net(self, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
        """The same; a family's projections may go from key head to key head instead."""
        config, prefix = self.config.gated_delta_net, "self_attention"
        assert config is not None
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        sizes = {"query": keys, "key": keys, "value": values, "z": values}
        sizes |= dict.fromkeys(("beta", "alpha"), config.value_heads)
        name = f"{prefix}.in_proj.weight"
        if config.interleaved:
            heads = range(config.key_heads)
            fused = {"qkvz": ("query", "key", "value", "z"), "ba": ("beta", "alpha")}
            for role, parts in fused.items():
                # From key head to key head, each part's share of it.
                shares = [(f"{name}.{part}", sizes[part] // len(heads)) for part in parts]
                rows = [Rows(one, head * n, n) for head in heads for one, n in shares]
                yield f"in_proj_{role}.weight", rows
        else:
            yield "in_proj_qkv.weight", _sections(name, sizes, ("query", "key", "value"))
            for role, part in (("z", "z"), ("b", "beta"), ("a", "alpha")):
                yield f"in_proj_{role}.weight", _sections(name, sizes, (part,))
        conv = f"{prefix}.conv1d.weight"
        yield "conv1d.weight", _sections(conv, sizes, ("query", "key", "value"))
        yield "dt_bias", [Rows(f"{prefix}.dt_bias", 0, config.value_heads)]
        yield "A_log", [Rows(f"{prefix}.A_log", 0, config.value_heads)]
        # Megatron's is one of its ordinary norms; the families' is never zero-centered.
        yield "norm.weight", [self._norm(f"{prefix}.out_norm.weight", False)]
        yield "out_proj.weight", [Rows(f"{prefix}.out_proj.weight")]

    def mlp(self, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
        """linear_fc1 has the gate before the up projection."""
        assert self.config.mlp is not None
        yield from _mlp(self.config.mlp, "mlp.", layer)

    def moe(self, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
        """Router, experts, and what is around them."""
        config = self.config.moe
        assert config is not None
        yield "router.weight", [Rows("mlp.router.weight", 0, config.num_experts)]
        if config.scoring == "sigmoid" and config.router_bias:
            yield "router.bias", [Rows("mlp.router.expert_bias", 0, config.num_experts)]
        for expert in range(config.num_experts):
            # Stacked, or each expert under its own names.
            prefix = "mlp.experts.experts."
            lead: tuple[tuple[int, int], ...] = ((expert, config.num_experts),)
            if layer.has_any(f"{prefix}{expert}.linear_fc1.weight"):
                prefix, lead = f"{prefix}{expert}.", ()
            for role, rows in _mlp(config.expert, prefix, layer):
                yield f"experts.{expert}.{role}", [replace(one, lead=lead) for one in rows]
        if config.shared is not None:
            for role, rows in _mlp(config.shared, "mlp.shared_experts.", layer):
                yield f"shared.{role}", rows
        if config.shared_gate:
            yield "shared_gate.weight", [Rows("mlp.shared_experts.gate_weight")]
        if config.latent_size is not None:
            yield "to_latent.weight", [Rows("mlp.fc1_latent_proj.weight")]
            yield "from_latent.weight", [Rows("mlp.fc2_latent_proj.weight")]


class _Layer:
    """One of Megatron's layers: its names, and its place among those that are one tensor."""

    def __init__(self, names: MegatronNames, index: int) -> None:
        self._stored = names.stored
        layers = len(names.config.pattern) // names.per_layer
        self._lead: tuple[tuple[int, int], ...] = ()
        self._prefix = f"decoder.layers.{index}."
        if names.stacks_layers:
            self._prefix, self._lead = "decoder.layers.", ((index, layers),)

    def has(self, name: str) -> bool:
        """Whether the layer has a tensor; false where the checkpoint is still to be written."""
        return self._stored is not None and self._prefix + name in self._stored

    def has_any(self, name: str) -> bool:
        """The same, of it or of its halves."""
        return self.has(name) or self.has(f"{name}_w")

    def at(self, rows: Rows) -> Rows:
        return replace(rows, name=self._prefix + rows.name, lead=self._lead + rows.lead)


def is_gpt_pattern(pattern: str) -> bool:
    """Whether GPTModel can have these blocks: attention or a gated delta net, then an MLP or
    experts, and so on."""
    return len(pattern) % 2 == 0 and bool(re.fullmatch(r"([*G][-E])+", pattern))


def _sections(name: str, sizes: Mapping[str, int], parts: Iterable[str]) -> list[Rows]:
    """Megatron keeps each section of a fused projection as a tensor of its own."""
    return [Rows(f"{name}.{part}", 0, sizes[part]) for part in parts]


def _qkv(config: AttentionConfig, name: str, kind: str) -> Iterator[tuple[str, list[Rows]]]:
    dim, per_group = config.head_dim, config.num_heads // config.num_kv_heads
    queries = per_group * dim
    gates = queries if config.output_gate else 0
    width = queries + gates + 2 * dim
    starts = range(0, config.num_kv_heads * width, width)
    if config.output_gate:  # ours: the query and the gate of each head in turn
        query_rows = [
            Rows(name, start + part + head * dim, dim)
            for start in starts
            for head in range(per_group)
            for part in (0, queries)
        ]
    else:
        query_rows = [Rows(name, start, queries) for start in starts]
    yield f"q_proj.{kind}", query_rows
    yield f"k_proj.{kind}", [Rows(name, start + queries + gates, dim) for start in starts]
    yield f"v_proj.{kind}", [Rows(name, start + queries + gates + dim, dim) for start in starts]


def _mlp(config: MLPConfig, prefix: str, layer: _Layer) -> Iterator[tuple[str, list[Rows]]]:
    size = config.intermediate_size
    for kind in ("weight", "bias") if config.bias else ("weight",):
        name = f"{prefix}linear_fc1.{kind}"
        if not config.gated:
            yield f"up_proj.{kind}", [Rows(name, 0, size)]
        elif layer.has(f"{name}_w"):  # the halves as tensors of their own
            yield f"gate_proj.{kind}", [Rows(f"{name}_w", 0, size)]
            yield f"up_proj.{kind}", [Rows(f"{name}_v", 0, size)]
        else:
            yield f"gate_proj.{kind}", [Rows(name, 0, size)]
            yield f"up_proj.{kind}", [Rows(name, size, size)]
    yield "down_proj.weight", [Rows(f"{prefix}linear_fc2.weight")]
    if config.bias:
        yield "down_proj.bias", [Rows(f"{prefix}linear_fc2.bias")]


# Of each kind of block: its norm's names (that of a layer with it inside the first projection, as
# Transformer Engine has it, then that of a layer of its own), and its mixer's roles.
_KINDS = {
    MAMBA: (("mixer.in_proj.layer_norm_weight", "norm.weight"), MegatronNames.mamba),
    ATTENTION: (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        MegatronNames.attention,
    ),
    GATED_DELTA_NET: (
        ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        MegatronNames.gated_delta_net,
    ),
    DENSE_MLP: (
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        MegatronNames.mlp,
    ),
    # megatron-core's own layers call the norm so even where experts follow it.
    EXPERTS: (("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), MegatronNames.moe),
}
