"""What Megatron's layers cannot express: such a model is refused by the name of what it has."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.models.checkpoints.megatron_names import is_gpt_pattern
from megatron_hybrid.models.config import (
    CONVOLVED_ATTENTION,
    GATED_DELTA_NET,
    IN_PLAIN_TORCH,
    INDEXED,
    LIGHTNING_ATTENTION,
    MAMBA1,
    SHARED_TRANSFORMER,
    SHORT_CONV,
    SIDE_BY_SIDE,
    SLIDING_ATTENTION,
    SLIDING_CONVOLVED_ATTENTION,
    BlockForm,
    HybridModelConfig,
)

_LAYERS = {
    MAMBA1: "Mamba1 layers",
    SHORT_CONV: "short convolutions",
    SIDE_BY_SIDE: "attention and Mamba2 side by side",
    SHARED_TRANSFORMER: "transformer blocks that layers share",
    LIGHTNING_ATTENTION: "lightning attention",
    SLIDING_ATTENTION: "letter for attention with a sliding window",
    CONVOLVED_ATTENTION: "attention over convolved queries and keys",
    SLIDING_CONVOLVED_ATTENTION: "attention over convolved queries and keys",
    **dict.fromkeys(sorted(INDEXED), "attention with an index"),
    **dict.fromkeys(sorted(IN_PLAIN_TORCH), "layers of RWKV, Griffin or xLSTM"),
}
_MAMBA_NORM_EPS = 1e-5  # of the norm inside MambaMixer, not to be set there


def check_expressible(config: HybridModelConfig) -> None:
    """Raise ConfigurationError, which says why, unless megatron-core's GPTModel or HybridModel
    computes what the model does."""
    reason = next(_reasons(config), None)
    if reason is not None:
        raise ConfigurationError(
            f"A {config.model_type} model of this configuration cannot be a Megatron checkpoint: "
            f"Megatron has no {reason}."
        )


def _reasons(config: HybridModelConfig) -> Iterator[str]:
    """What the model has and Megatron has not."""
    if any(config.form(block).whole for block in range(len(config.pattern))):
        yield "short convolutions behind its layers"
    if config.streams is not None:
        yield "several residual streams"
    yield from (kind for letter, kind in _LAYERS.items() if letter in config.pattern)
    if GATED_DELTA_NET in config.pattern and not is_gpt_pattern(config.pattern) and config.rope:
        yield "rotary positions in a HybridModel with gated delta nets"
    if any(config.form(block) != BlockForm() for block in range(len(config.pattern))):
        yield "norms behind its layers"
    attention, mamba, moe = config.attention, config.mamba, config.moe
    mlps = [mlp for mlp in (config.mlp, None if moe is None else moe.expert) if mlp is not None]
    multipliers = [
        ("embedding multiplier", config.embedding_multiplier),
        ("residual multiplier", config.residual_multiplier),
        ("divisor of logits", config.logits_divisor),
    ]
    if attention is not None:
        multipliers.append(("multiplier of attention's input", attention.input_multiplier))
        multipliers.append(("multiplier of attention's output", attention.out_multiplier))
        if attention.scale != attention.head_dim**-0.5:
            yield f"scale of attention other than head_dim ** -0.5 (here {attention.scale})"
        if attention.head_gate:
            yield "gate for each head of attention"
        if attention.norm_over_heads:
            yield "norms over all heads of queries or keys"
        if attention.qk_norm and attention.zero_centered_norm != config.zero_centered_norm:
            yield "norms of q and k that are centered otherwise than the other norms"
    if config.gated_delta_net is not None:
        multipliers.append(("multiplier of a delta net's beta", config.gated_delta_net.beta_scale))
    if mamba is not None:
        multipliers.append(("multiplier of Mamba's input", mamba.input_multiplier))
        multipliers.append(("multiplier of Mamba's output", mamba.out_multiplier))
        multipliers += [("multiplier inside Mamba", value) for value in mamba.in_multipliers]
        if mamba.proj_bias or mamba.out_bias:
            yield "bias in Mamba's projections"
        if not mamba.conv_bias:
            yield "convolution of Mamba without bias"
        if mamba.norm != "gate_first":
            yield f"Mamba layer with its norm {mamba.norm!r}, only 'gate_first'"
        eps = config.norm_eps if mamba.norm_eps is None else mamba.norm_eps
        if eps != _MAMBA_NORM_EPS:
            yield f"epsilon of the norm in Mamba other than {_MAMBA_NORM_EPS} (here {eps})"
    for mlp in mlps:
        multipliers.append(("multiplier of an MLP's gate", mlp.gate_multiplier))
        multipliers.append(("multiplier of an MLP's output", mlp.out_multiplier))
        if (mlp.gated, mlp.activation) not in ((True, "silu"), (False, "relu2")):
            gate = "with" if mlp.gated else "without"
            yield (
                f"MLP of {mlp.activation!r} {gate} a gate, only of silu with one and relu2 without"
            )
    yield from (f"{name} (here {value})" for name, value in multipliers if value != 1.0)
    if moe is not None:
        yield from _moe_reasons(moe, [*mlps, *filter(None, [moe.shared])])


def _moe_reasons(moe: MoEConfig, mlps: list[MLPConfig]) -> Iterator[str]:
    if moe.expert.bias:
        yield "biases around experts that have none"
    if len({(mlp.gated, mlp.activation) for mlp in mlps}) > 1:
        yield "experts with another activation than the other MLPs"
    if moe.scoring != "sigmoid":
        return
    if moe.normalize_weights != (moe.experts_per_token > 1):
        yield "sigmoid router whose weights are not normalised"
    # It adds up the best experts_per_token / chosen_groups experts of a group, we two.
    if moe.num_groups > 1 and moe.experts_per_token // moe.chosen_groups != 2:
        yield (
            "choice of expert groups by their two best experts, with "
            f"{moe.experts_per_token} experts a token in {moe.chosen_groups} groups"
        )
    if moe.weights_eps != 1e-20:
        yield f"sum of sigmoid weights with {moe.weights_eps} added, only with 1e-20"
