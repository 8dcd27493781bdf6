"""What a model is: its layer pattern, sizes and constants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mixer import LayerConfig
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.layers.shared_transformer import SharedTransformerConfig
from megatron_hybrid.layers.short_conv import ShortConvConfig
from megatron_hybrid.layers.side_by_side import SideBySideConfig
from megatron_hybrid.layers.streams import StreamsConfig

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}

# Megatron's letters for layers, and below those that it has none for.
MAMBA, ATTENTION, DENSE_MLP, EXPERTS, GATED_DELTA_NET = "M", "*", "-", "E", "G"
MAMBA1, SHORT_CONV, SIDE_BY_SIDE, SHARED_TRANSFORMER = "S", "C", "H", "Z"
LATENT_ATTENTION, KIMI_DELTA_ATTENTION, LIGHTNING_ATTENTION = "A", "K", "N"
SLIDING_ATTENTION, NGRAM_EMBEDDING = "L", "P"
# With an index; latent attention that shares the index of an earlier layer.
INDEXED_ATTENTION, INDEXED_LATENT_ATTENTION, SHARED_INDEX = "Q", "D", "J"
INDEXED = frozenset({INDEXED_ATTENTION, INDEXED_LATENT_ATTENTION, SHARED_INDEX})
# Attention whose queries and keys are convolved; with a sliding window.
CONVOLVED_ATTENTION, SLIDING_CONVOLVED_ATTENTION = "V", "Y"
# With keys and values of all tokens, or latents.
WITH_KV = INDEXED | {
    *(ATTENTION, SIDE_BY_SIDE, SHARED_TRANSFORMER, LATENT_ATTENTION, CONVOLVED_ATTENTION)
}
# RWKV's mixing of time and of channels; Griffin's recurrent unit; xLSTM's cell.
TIME_MIX, CHANNEL_MIX, RG_LRU, MLSTM = "W", "F", "R", "X"
# Whose kernels are in plain torch alone; and of these whose states hold exponents.
IN_PLAIN_TORCH = frozenset({TIME_MIX, CHANNEL_MIX, RG_LRU, MLSTM})
WITH_EXPONENTS = frozenset({TIME_MIX, MLSTM})
# Whose scans are computed chunk by chunk.
CHUNKED = frozenset(
    {MAMBA, GATED_DELTA_NET, KIMI_DELTA_ATTENTION, LIGHTNING_ATTENTION, SIDE_BY_SIDE}
    | {SHARED_TRANSFORMER, TIME_MIX, RG_LRU, MLSTM}
)


@dataclass(frozen=True)
class MTPConfig:
    """A head for multi-token prediction: see mtp.py. `pattern`: of its blocks. `unsupported`: a
    sentence that says why it cannot be used, and then it has no pattern; empty where it can."""

    pattern: str
    unsupported: str = ""

    @classmethod
    def of(cls, pattern: str, depth: int, where: str) -> MTPConfig | None:
        """Of a model with `depth` heads, one behind the other, as a file `where` says."""
        if depth == 0:
            return None
        if depth > 1:
            return cls("", f"{where} describes {depth} heads; drafts come from one at most.")
        if not re.fullmatch(r"\*[-E]*", pattern):
            return cls(
                "",
                f"{where} describes a head of the layers {pattern!r}; it must be one attention "
                "layer (*), and behind it MLPs (-) or experts (E).",
            )
        return cls(pattern)


@dataclass(frozen=True)
class BlockForm:
    """Which norms a block has around its mixer, one at least: what it adds to the residual stream x
    is mixer(norm(x)), post_norm(mixer(x)), or with both of them post_norm(mixer(norm(x))); times
    `multiplier`, besides the model's residual_multiplier. `from_norm`: it is added to
    `stream_multiplier` * norm(x), not to x. `whole`: the mixer itself adds up what the ranks have.
    `scaled`: both are scaled and shifted before they are added: see ResidualScaling."""

    norm: bool = True
    post_norm: bool = False
    multiplier: float = 1.0
    from_norm: bool = False
    stream_multiplier: float = 1.0
    whole: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        assert not (self.scaled and (self.post_norm or self.from_norm))
        assert self.norm or (self.post_norm and not self.from_norm)
        assert self.from_norm or self.stream_multiplier == 1.0
        assert not (self.whole and self.post_norm)


@dataclass(frozen=True)
class HybridModelConfig:
    """`pattern` has a letter a block:

        M  Mamba2              *  attention             H  attention and Mamba2 side by side
        S  Mamba1              -  MLP                   Z  Mamba1 or 2, whose input a shared
        G  gated delta net     E  mixture of experts       transformer block adds to
        C  short convolution   A  latent attention      W  RWKV's time mixing
        N  lightning attention K  Kimi delta attention  F  RWKV's channel mixing
        R  real-gated linear recurrent unit             X  mLSTM
        L  attention with a sliding window (local)
        Q  attention with an index              D  latent attention with an index (DeepSeek's)
        J  the same that shares an earlier layer's index
        P  embeddings of n-grams, into several residual streams (per layer)
        V  attention whose queries and keys are convolved; Y the same with a sliding window

    Every block is x + residual_multiplier * mixer(norm(x)), or as its BlockForm says. The
    description of a kind of block is None when the pattern has none of it; `others` has those of
    kinds that a family or two have.
    """

    model_type: str
    pattern: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm_eps: float
    dtype: torch.dtype  # of the checkpoint
    attention: AttentionConfig | None = None
    mamba: Mamba2Config | None = None
    mamba1: Mamba1Config | None = None
    gated_delta_net: GatedDeltaNetConfig | None = None
    short_conv: ShortConvConfig | None = None
    shared_transformer: SharedTransformerConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    others: Mapping[str, LayerConfig] = field(default_factory=dict)  # by letter
    tie_word_embeddings: bool = False
    # Rows that a checkpoint's embedding and head may have beside vocab_size: the others are of no
    # token.
    padded_vocab_size: int | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None  # logits are cap * tanh(logits / cap)
    residual_in_fp32: bool = False
    zero_centered_norm: bool = False  # of the blocks; see RMSNorm
    forms: tuple[BlockForm, ...] = ()  # of the pattern's blocks; empty: the usual one of all
    layer_norm: bool = False  # norms are LayerNorms
    # Behind so many blocks the model halves its residual stream, which is kept as it is; 0: never.
    halved_every: int = 0
    embedding_norm: bool = False  # embeddings go through a norm of their own
    embedding_scale: bool = False  # or through a ChannelScale
    streams: StreamsConfig | None = None  # several residual streams; None: the usual one
    mtp: MTPConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def rope(self) -> RopeConfig | None:
        """Of its attention layers; None: they have no positions, or there are none."""
        shared = self.shared_transformer
        attention = self.attention if shared is None else shared.attention
        return None if attention is None else attention.rope

    @property
    def residual_size(self) -> int:
        """Numbers that go from block to block for each token."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    def layer(self, letter: str) -> LayerConfig:
        """What layers of a kind are. Raises ConfigurationError for a kind that is not described."""
        if letter == SIDE_BY_SIDE and self.attention is not None and self.mamba is not None:
            return SideBySideConfig(self.attention, self.mamba)
        described: dict[str, LayerConfig | None] = {
            MAMBA: self.mamba,
            ATTENTION: self.attention,
            DENSE_MLP: self.mlp,
            EXPERTS: self.moe,
            GATED_DELTA_NET: self.gated_delta_net,
            MAMBA1: self.mamba1,
            SHORT_CONV: self.short_conv,
            **self.others,
        }
        if (found := described.get(letter)) is None:
            raise undescribed(letter)
        return found

    def letter(self, block: int) -> str:
        """Of a block of the model, or of its head's, which are counted on from the last one."""
        return (self.pattern + ("" if self.mtp is None else self.mtp.pattern))[block]

    def form(self, block: int) -> BlockForm:
        """Of the same blocks: a head's is the usual one."""
        return self.forms[block] if block < len(self.forms) else BlockForm()

    def carried_size(self, boundary: int) -> int:
        """Numbers of a token that routers hand from the blocks before this one to those from there
        on; 0: none do."""
        moe = self.moe
        if moe is None or moe.router is None or moe.router.first >= boundary:
            return 0
        return moe.router.size if EXPERTS in self.pattern[boundary:] else 0

    def stream_divisor(self, block: int) -> float:
        """What the residual stream in front of a block is divided by as long as it is kept: the
        last stream_multiplier, which costs nothing then. Norms do not notice but for their eps."""
        before = [form for form in self.forms[:block] if form.from_norm]
        return before[-1].stream_multiplier if before else 1.0

    def norm_eps_before(self, block: int) -> float:
        """Of the norm in front of a block, for the residual stream as it is kept."""
        halvings = block // self.halved_every if self.halved_every else 0
        return self.norm_eps * 4.0**halvings / self.stream_divisor(block) ** 2


def undescribed(letter: str) -> ConfigurationError:
    """For a kind of layers that a configuration does not describe."""
    return ConfigurationError(f"The model does not describe its layers of kind {letter!r}.")


def resolve_dtype(
    dtype: str | torch.dtype | None, default: torch.dtype = torch.float32
) -> torch.dtype:
    """A dtype by its name ("bfloat16", "bf16", ...); None and "auto" give `default`.

    Raises ConfigurationError for a name that is not known.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None or dtype == "auto":
        return default
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigurationError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}.")
    return found
