"""Ring-linear and Ling 2.5 (inclusionAI, arXiv 2510.19338), which transformers does not have: their
formulas, in float64 and without any cache, behind what the tests' tiny models are made with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


class RingLinearConfig(SimpleNamespace):
    """The values of config.json."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"model_type": "bailing_moe_linear"} | values)


def slopes(heads: int) -> list[float]:
    """As ALiBi's (Press et al., 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return own if power == heads else own + slopes(2 * power)[0::2][: heads - power]


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.double())


class Norm(nn.Module):
    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        by_group = x.unflatten(-1, (self.groups, -1))
        scale = (by_group.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (by_group * scale).flatten(-2) * self.weight.double()


def turned(x: Tensor, theta: float, dims: int, interleaved: bool = False) -> Tensor:
    """x [batch, tokens, heads, head_dim], its first `dims` dimensions by the tokens' places."""
    half = dims // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    own = x[..., :dims]
    pairs = own.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    made = torch.complex(first, second) * turn
    return torch.cat((made.real, made.imag, x[..., dims:]), dim=-1)


class LinearAttention(nn.Module):
    def __init__(self, c: RingLinearConfig, layer: int) -> None:
        super().__init__()
        self.c, self.heads = c, c.num_attention_heads
        size = self.heads * c.head_dim
        self.query_key_value = nn.Linear(c.hidden_size, 3 * size, bias=False)
        self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.g_proj = nn.Linear(c.hidden_size, size, bias=False)
        self.g_norm = Norm(size, c.rms_norm_eps, c.group_norm_size)
        self.dense = nn.Linear(size, c.hidden_size, bias=False)
        factor = 1 - (layer - 1) / (c.num_hidden_layers - 1) + 1e-5
        self.rates = torch.tensor(slopes(self.heads), dtype=torch.float64) * factor

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        qkv = linear(x, self.query_key_value)
        if c.linear_silu:
            qkv = F.silu(qkv)
        q, k, v = qkv.unflatten(-1, (3, self.heads, c.head_dim)).unbind(2)
        dims = int(c.head_dim * c.partial_rotary_factor)
        q = turned(self.query_layernorm(q), c.rope_theta, dims)
        k = turned(self.key_layernorm(k), c.rope_theta, dims)
        place = torch.arange(x.shape[1])
        ago = (place[:, None] - place).double()
        decay = torch.where(ago >= 0, torch.exp(-self.rates[:, None, None] * ago.clamp(min=0)), 0)
        scores = torch.einsum("blhd,bshd->bhls", q, k) * c.head_dim**-0.5 * decay
        y = torch.einsum("bhls,bshd->blhd", scores, v).flatten(2)
        return linear(self.g_norm(y) * torch.sigmoid(linear(x, self.g_proj)), self.dense)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, [batch, tokens, heads, dims] each -> [batch, tokens, heads * dims]."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, c: RingLinearConfig) -> None:
        super().__init__()
        self.c, self.heads, self.kv_heads = c, c.num_attention_heads, c.num_key_value_heads
        rows = (self.heads + 2 * self.kv_heads) * c.head_dim
        self.query_key_value = nn.Linear(c.hidden_size, rows, bias=False)
        self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.dense = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c, sizes = self.c, [self.heads, self.kv_heads, self.kv_heads]
        heads = linear(x, self.query_key_value).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split(sizes, dim=2)
        dims = int(c.head_dim * c.partial_rotary_factor)
        q = turned(self.query_layernorm(q), c.rope_theta, dims)
        k = turned(self.key_layernorm(k), c.rope_theta, dims)
        return linear(attended(q, k, v), self.dense)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all keys and values are made."""

    def __init__(self, c: RingLinearConfig) -> None:
        super().__init__()
        self.c, hidden, heads = c, c.hidden_size, c.num_attention_heads
        query, inner = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * query, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, c.q_lora_rank, bias=False)
            self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
            self.q_b_proj = nn.Linear(c.q_lora_rank, heads * query, bias=False)
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent, bias=False)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * inner, bias=False)
        self.dense = nn.Linear(heads * c.v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c, heads, dims = self.c, self.c.num_attention_heads, self.c.qk_rope_head_dim
        if c.q_lora_rank is None:
            q = linear(x, self.q_proj)
        else:
            q = linear(self.q_a_layernorm(linear(x, self.q_a_proj)), self.q_b_proj)
        kv, key = linear(x, self.kv_a_proj_with_mqa).split([c.kv_lora_rank, dims], dim=-1)
        kv = linear(self.kv_a_layernorm(kv), self.kv_b_proj).unflatten(-1, (heads, -1))
        nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        first, last = q.unflatten(-1, (heads, -1)).split([c.qk_nope_head_dim, dims], dim=-1)
        last = turned(last, c.rope_theta, dims, c.rope_interleave)
        key = turned(key[:, :, None], c.rope_theta, dims, c.rope_interleave)
        q = torch.cat((first, last), dim=-1)
        k = torch.cat((nope, key.expand(-1, -1, heads, -1)), dim=-1)
        return linear(attended(q, k, value), self.dense)


class Gate(nn.Module):
    expert_bias: Tensor

    def __init__(self, c: RingLinearConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the experts' shares [..., experts], mostly zeros."""
        c, scores = self.c, torch.sigmoid(F.linear(x, self.weight.double()))
        biased = (scores + self.expert_bias.double()).unflatten(-1, (c.n_group, -1))
        best = biased.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        allowed = torch.zeros_like(biased[..., 0]).scatter(-1, best, 1)[..., None]
        biased = biased.masked_fill(allowed == 0, -math.inf).flatten(-2)
        chosen = biased.topk(c.num_experts_per_tok, dim=-1).indices
        shares = scores.gather(-1, chosen)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, shares)


class MLP(nn.Module):
    def __init__(self, c: RingLinearConfig, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Experts(nn.Module):
    def __init__(self, c: RingLinearConfig) -> None:
        super().__init__()
        size = c.moe_intermediate_size
        self.gate = Gate(c)
        self.experts = nn.ModuleList(MLP(c, size) for _ in range(c.num_experts))
        self.shared_experts = MLP(c, size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x)
        routed = (shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.shared_experts(x) + sum(routed)


class Layer(nn.Module):
    def __init__(self, c: RingLinearConfig, layer: int) -> None:
        super().__init__()
        group, count = c.layer_group_size, c.num_hidden_layers
        softmax = (layer + 1) % group == 0 or layer >= count // group * group
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        is_latent = getattr(c, "kv_lora_rank", None) is not None
        kind = LatentAttention if is_latent else Attention
        self.attention = kind(c) if softmax else LinearAttention(c, layer)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        is_dense = layer < c.first_k_dense_replace
        self.mlp = MLP(c, c.intermediate_size) if is_dense else Experts(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class RingLinearForCausalLM(nn.Module):
    """With what the tests ask of transformers' models."""

    def __init__(self, config: RingLinearConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        assert not use_cache
        x = self.model.word_embeddings(input_ids).double()
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(logits=linear(self.model.norm(x), self.lm_head).float())

    def save_pretrained(self, folder: str | Path) -> None:
        weights = self.state_dict()
        if self.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.contiguous() for name, value in weights.items()},
            Path(folder) / "model.safetensors",
            {"format": "pt"},
        )
        values = vars(self.config) | {"architectures": [type(self).__name__], "dtype": "float32"}
        (Path(folder) / "config.json").write_text(json.dumps(values))
