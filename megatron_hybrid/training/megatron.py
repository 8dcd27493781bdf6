"""A model of megatron-core that computes as an engine in batch-invariant mode.

    model = MambaModel(config, spec, ...)           # megatron-core's, as its training loop has it
    kernels = compute_as_engine(model)
    logits = model(tokens, positions, None)         # an engine's bits, with gradients
    logprobs = kernels.log_softmax(logits)

Modules, parameters, optimiser and checkpoints stay Megatron's. What is replaced are the forward
passes of its layers, by the engine's kernels under autograd (kernels.py). The layers are those of
a specification without Transformer Engine; the model is not split over tensor- or context-parallel
ranks, and its tokens are [batch, tokens], what is behind a sequence's end being anything.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import AttentionShape, KVCache
from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import (
    ConvConstants,
    Inputs,
    Mamba2Constants,
    Mamba2Tokens,
)
from megatron_hybrid.training.formulas import Sequences
from megatron_hybrid.training.kernels import under_autograd
from megatron_hybrid.training.nodes import recomputed
from megatron_hybrid.training.whole_sequences import WholeSequences

_BLOCK_SIZE = 64  # of KV caches, which has no part in bits
_ROUTER_EPS = 1e-20


class EngineKernels:
    """The engine's kernels in batch-invariant mode under autograd, for Megatron's [s, b, ...]."""

    def __init__(self, device: torch.device, name: str = "auto") -> None:
        """`name`: as --kernels has it."""
        self.plain = kernel_set.select(name, device, batch_invariant=True)
        self.device = device
        # Where it does not count which tokens are a sequence's.
        self.by_row = under_autograd(self.plain, Sequences.of([1], device))
        self.step = lru_cache(8)(self._step)

    def _step(self, tokens: int, batch: int) -> tuple[KernelSet, WholeSequences]:
        sequences = Sequences.of([tokens] * batch, self.device)
        return under_autograd(self.plain, sequences), WholeSequences.of(sequences, _BLOCK_SIZE)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[..., vocabulary] -> the same in float32."""
        kernel, formula = self.plain.sampling.log_softmax, partial(torch.log_softmax, dim=-1)
        rows: Tensor = recomputed(kernel, formula, logits.float().flatten(0, -2))
        return rows.view(logits.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        y: Tensor = self.by_row.linear.multiply(x.flatten(0, -2), weight, bias)
        return y.view(*x.shape[:-1], -1)

    def norm(self, x: Tensor, weight: Tensor, eps: float, is_first: bool) -> Tensor:
        """`is_first`: of what the embedding gives. All others the engine takes in one kernel with
        the sum before, which may add up a row in another order."""
        rows, norm = x.flatten(0, -2), self.by_row.norm
        if is_first:
            return norm.rms_norm(rows, weight, eps, weight.dtype).view(x.shape)
        nothing = torch.zeros_like(rows)
        normed, _ = norm.add_rms_norm(nothing, rows, 1.0, weight, eps, weight.dtype)
        assert isinstance(normed, Tensor)
        return normed.view(x.shape)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [s, b, heads, head_dim], key and value [s, b, kv_heads, head_dim] -> [s, b, all]"""
        kernels, step = self.step(*query.shape[:2])
        (heads, head_dim), kv_heads = query.shape[2:], key.shape[2]
        kind = query.dtype
        shape = AttentionShape(heads, kv_heads, head_dim, scale, _BLOCK_SIZE, kind, kind)
        plan = kernels.attention.plan(step.paged, shape)
        size = step.num_blocks, _BLOCK_SIZE, kv_heads, head_dim
        keys, values = (torch.zeros(size, dtype=kind, device=self.device) for _ in "kv")
        cache = KVCache(keys, values)
        qkv = _packed(torch.cat((query, key, value), dim=2))
        rotated = kernels.rope.prepare(qkv, None, None, cache, plan)
        return _unpacked(kernels.attention.attend(rotated, cache, plan).flatten(1), query)

    def mamba2(self, mixer: Any, projected: Tensor) -> Tensor:
        """What is between a MambaMixer's projections: [s, b, z x B C dt] -> [s, b, inner]."""
        kernels, step = self.step(*projected.shape[:2])
        replays = kernels.replays
        assert replays is not None
        chunk, rows = replays.chunk, _packed(projected)
        heads, groups, size = mixer.nheads, mixer.ngroups, mixer.d_state
        inner, per_group, batch = heads * mixer.headdim, groups * size, projected.shape[1]
        z, convolved, dt = rows.split([inner, inner + 2 * per_group, heads], dim=1)

        def zeros(*shape: int, dtype: torch.dtype = rows.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        # Channels side by side, as in the activations.
        weight = mixer.cp.get_conv1d_weight()[:, 0].t().contiguous().t()
        channels, width = weight.shape
        values = replays.conv.run(
            convolved,
            ConvConstants(weight, mixer.cp.get_conv1d_bias()),
            zeros(1, width - 1, channels).transpose(1, 2),
            zeros(batch, chunk, channels),
            replays.conv.plan(step.prefill, chunk, width, chunk),
        )
        x, b, c = values.split([inner, per_group, per_group], dim=1)
        tokens = Mamba2Tokens(
            x.unflatten(1, (heads, -1)), b.unflatten(1, (groups, -1)), c.unflatten(1, (groups, -1)),
            dt,
        )  # fmt: skip
        constants = Mamba2Constants(
            -torch.exp(mixer.cp.get_A_log().float()),
            mixer.cp.get_D().float(),
            mixer.cp.get_dt_bias().float(),
            (0.0, float("inf")),
        )
        y = replays.mamba2_scan.run(
            tokens,
            constants,
            zeros(1, heads, mixer.headdim, size, dtype=torch.float32),
            tuple(zeros(batch, chunk, *kept.shape[1:]) for kept in tokens.kept),
            replays.mamba2_scan.plan(step.prefill, chunk, chunk),
        ).flatten(1)
        if not mixer.rmsnorm:
            gated = kernels.activation.gate(y, z, "silu")
        else:
            norm = mixer.norm
            gated = kernels.norm.gated_rms_norm(y, z, norm.weight, norm.group_size, norm.eps)
        assert isinstance(gated, Tensor)
        return _unpacked(gated, projected)

    def mlp(self, x: Tensor, up: Tensor, down: Tensor, activation: str, gated: bool) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        rows = x.flatten(0, -2)
        linear = self.by_row.linear
        hidden: Inputs | None = linear.multiply_activated(rows, up, None, activation, gated)
        if hidden is None:
            inner = self.linear(rows, up)
            hidden = self.by_row.activation.activate(inner, activation, gated)
        assert isinstance(hidden, Tensor)
        return self.linear(hidden, down).view(x.shape)

    def experts(self, layer: Any, x: Tensor) -> Tensor:
        """A MoELayer of SequentialMLP's experts."""
        config, kernels, rows = layer.config, self.by_row.experts, x.flatten(0, -2)
        activation, scoring = activation_of(config), config.moe_router_score_function
        normalizes = not config.moe_router_pre_softmax
        if scoring == "sigmoid":
            normalizes = config.moe_router_topk > 1
        router = Router(
            layer.router.weight,
            config.moe_router_topk,
            scoring,
            normalizes,
            layer.router.expert_bias,
            config.moe_router_num_groups or 1,
            config.moe_router_group_topk or 1,
            _ROUTER_EPS,
            config.moe_router_topk_scaling_factor or 1.0,
        )
        up, down = (
            torch.stack([getattr(expert, name).weight for expert in layer.experts.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )
        gated = config.gated_linear_unit
        weights = ExpertWeights(up, down, activation, gated, 0)
        beside: Shared | None = None
        if (shared := layer.shared_experts) is not None:
            own = shared.linear_fc1.weight, shared.linear_fc2.weight
            beside = SharedExpert(*own, shared.gate_weight)
            if not kernels.takes_shared(rows, weights, beside):
                beside = SharedResult(self.mlp(rows, *own, activation, gated), shared.gate_weight)
        chosen, shares = kernels.route(rows, router)
        mixed = kernels.mix_parts(rows, chosen, shares, weights, beside)
        assert isinstance(mixed, Tensor)
        return mixed.view(x.shape)


def _packed(x: Tensor) -> Tensor:
    """[s, b, ...] -> [tokens, ...], the sequences behind each other."""
    return x.transpose(0, 1).flatten(0, 1)


def _unpacked(rows: Tensor, like: Tensor) -> Tensor:
    """[tokens, width] -> [s, b, width] with the s and b of `like`."""
    return rows.unflatten(0, (like.shape[1], like.shape[0])).transpose(0, 1)


def activation_of(config: Any) -> str:
    """A Megatron configuration's, by our name. Raises ConfigurationError for another."""
    from megatron.core.activations import squared_relu

    known = {F.silu: "silu", squared_relu: "relu2", F.gelu: "gelu"}
    if config.activation_func not in known:
        raise ConfigurationError(f"The activation {config.activation_func} is not supported.")
    return known[config.activation_func]


def compute_as_engine(model: Any, kernels: str = "auto") -> EngineKernels:
    """Replace what a Megatron model's layers compute with, in place; see above. `kernels`: as
    --kernels has it. Raises ConfigurationError for a model, or a layer, that is not supported."""
    import megatron_hybrid.parallel.megatron  # noqa: F401  # hides what cannot be imported

    # isort: split
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    _refuse_options(model)
    engine = EngineKernels(next(model.parameters()).device, kernels)
    is_first = bool(model.pre_process)

    def replace(module: Any) -> None:
        nonlocal is_first
        inner = list(module.children())
        match module:
            case MoELayer():
                _refuse_experts(module)
                module.forward = partial(_experts, engine, module)
                inner = []
            case MambaMixer():
                _refuse_mixer(module)
                module._ssm_training = partial(_between_projections, engine, module)
                inner = [module.in_proj, module.out_proj]
            case MLP():
                _refuse_biases(module.linear_fc1, module.linear_fc2)
                module.forward = partial(_mlp, engine, module, activation_of(module.config))
                inner = []
            case ColumnParallelLinear() | RowParallelLinear():
                if isinstance(module, RowParallelLinear) or module.skip_bias_add:
                    _refuse_biases(module)
                module._forward_impl = partial(_product, engine)
            case DotProductAttention():
                module.forward = partial(_attention, engine, module.softmax_scale)
            case nn.RMSNorm():
                norm: Any = module
                norm.forward = partial(_normed, engine, module, is_first)
                is_first = False
            case VocabParallelEmbedding():
                pass
            case _ if any(True for _ in module.parameters(recurse=False)):
                raise ConfigurationError(f"A layer of the type {type(module)} is not supported.")
        for one in inner:
            replace(one)

    replace(model)
    return engine


def _experts(engine: EngineKernels, layer: Any, x: Tensor, *_: Any, **__: Any) -> Any:
    return engine.experts(layer, x), None


def _mlp(engine: EngineKernels, mlp: Any, activation: str, x: Tensor, *_: Any, **__: Any) -> Any:
    up, down = mlp.linear_fc1.weight, mlp.linear_fc2.weight
    return engine.mlp(x, up, down, activation, mlp.config.gated_linear_unit), None


def _product(
    engine: EngineKernels, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any
) -> Tensor:
    return engine.linear(input, weight, bias)


def _attention(
    engine: EngineKernels,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    return engine.attention(query, key, value, scale)


def _normed(engine: EngineKernels, module: nn.RMSNorm, is_first: bool, x: Tensor) -> Tensor:
    assert module.eps is not None
    return engine.norm(x, module.weight, module.eps, is_first)


def _between_projections(
    engine: EngineKernels, mixer: Any, projected: Tensor, packed_seq_params: Any = None
) -> Tensor:
    if packed_seq_params is not None:
        raise ConfigurationError("Packed sequences are not supported.")
    return engine.mamba2(mixer, projected)


def _refuse_options(model: Any) -> None:
    config = model.config
    refused = {
        "tensor parallel ranks": config.tensor_model_parallel_size > 1,
        "context parallel ranks": config.context_parallel_size > 1,
        "rotary embeddings": model.position_embedding_type != "none",
        "dropout": config.hidden_dropout or config.attention_dropout,
        "norms of queries and keys": config.qk_layernorm,
        "norms around zero": config.layernorm_zero_centered_gamma,
        "residuals in float32": config.fp32_residual_connection,
        "a window of attention": config.window_size is not None,
        "a softmax with an offset": config.softmax_type != "vanilla",
        "scaling by layer": config.apply_query_key_layer_scaling,
        "fused gradient accumulation": config.gradient_accumulation_fusion,
    }
    for what, is_there in refused.items():
        if is_there:
            raise ConfigurationError(f"A Megatron model with {what} is not supported.")


def _refuse_biases(*layers: Any) -> None:
    if any(layer.bias is not None for layer in layers):
        raise ConfigurationError("Biases that Megatron adds to rounded sums are not supported.")


def _refuse_mixer(mixer: Any) -> None:
    if mixer.D_has_hdim or not mixer.use_mem_eff_path:
        raise ConfigurationError(
            "Mamba layers with a D of each channel, or without --use-mamba-mem-eff-path, are not "
            "supported."
        )


def _refuse_experts(layer: Any) -> None:
    config = layer.config
    if not hasattr(layer.experts, "local_experts") or config.expert_model_parallel_size > 1:
        raise ConfigurationError(
            "Experts other than SequentialMLP's, or on several ranks, are not supported."
        )
    if getattr(config, "moe_latent_size", None) is not None:
        raise ConfigurationError("Experts in a latent size are not supported.")
