"""megatron-core's hybrid layers as they are had without Transformer Engine."""

from __future__ import annotations

from typing import Any


def hybrid_spec() -> Any:
    """The layers of a HybridStack (MambaStack before megatron-core 0.17) without Transformer
    Engine, under the names that they have in checkpoints with it."""
    import megatron.core.ssm.mamba_block as names  # old place, of both

    try:
        import megatron.core.models.hybrid.hybrid_block as block
    except ImportError:
        block = names
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    block.TENorm = WrappedTorchNorm
    dense = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    experts = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm").submodules

    def layer(kind: type, keys: dict[str, str] | None = None, **parts: Any) -> Any:
        return ModuleSpec(
            module=kind,
            submodules=TransformerLayerSubmodules(
                **parts, sharded_state_dict_keys_map=dict(keys or {})
            ),
        )

    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    return ModuleSpec(
        module=block.MambaStack,
        submodules=block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=mixer,
                    mamba_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            attention_layer=layer(
                TransformerLayer,
                {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
                input_layernorm=WrappedTorchNorm,
                self_attention=dense.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
            mlp_layer=layer(
                MLPLayer,
                {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=dense.mlp,
                mlp_bda=get_bias_dropout_add,
            ),
            moe_layer=layer(
                TransformerLayer,
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=experts.mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
