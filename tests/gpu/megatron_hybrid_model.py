"""megatron-core's hybrid model on a GPU, with mamba_ssm's kernels: saves itself, and reads what we
convert. Its layers but Mamba's are those that need no Transformer Engine.

    python -m tests.gpu.megatron_hybrid_model save FOLDER   writes saved and logits in it
    python -m tests.gpu.megatron_hybrid_model read FOLDER   reads again, writes logits2
"""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_hybrid.parallel.megatron as megatron
from tests.models.megatron_spec import hybrid_spec

TOKENS = [(7 * i * i + 3 * i + 1) % 160 for i in range(200)]
PATTERN = "ME*M-EM"
CONFIG: dict[str, Any] = {
    "num_layers": len(PATTERN),
    "hidden_size": 256,
    "ffn_hidden_size": 384,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_num_groups": 2,
    "mamba_state_dim": 128,
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-5,
}
ARGUMENTS = {name: value for name, value in CONFIG.items() if name != "num_moe_experts"} | {
    "num_experts": CONFIG["num_moe_experts"],
    "norm_epsilon": CONFIG["layernorm_epsilon"],
    "hybrid_layer_pattern": PATTERN,
    "squared_relu": True,
    "swiglu": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "padded_vocab_size": 160,
    "max_position_embeddings": 1024,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
}


def build() -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        **CONFIG,
        activation_func=squared_relu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    known = inspect.signature(MambaModel.__init__).parameters
    new = "hybrid_layer_pattern" in inspect.signature(MambaModel.__mro__[1].__init__).parameters
    pattern = "hybrid_override_pattern" if "hybrid_override_pattern" in known else ""
    pattern = "hybrid_layer_pattern" if new else pattern
    model = MambaModel(
        config,
        hybrid_spec(),
        vocab_size=160,
        max_sequence_length=1024,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        **{pattern: PATTERN},
    )
    return model.cuda().eval()


@torch.no_grad()
def draw_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
    for name, values in (*model.named_parameters(), *buffers):
        normal = torch.randn(values.shape, generator=generator)
        if name.endswith("A_log"):
            normal = (1 + 15 * torch.rand(values.shape, generator=generator)).log()
        elif name.endswith("dt_bias"):
            normal -= 2
        elif "norm" in name or name.endswith(".D"):
            normal = 1 + 0.2 * normal
        elif "conv1d" in name:
            normal *= 0.5
        elif values.ndim == 2 and "embedding" not in name:
            normal *= 0.5 / values.shape[1] ** 0.5
        elif "embedding" not in name:
            normal *= 0.1
        values.data.copy_(normal)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """[tokens, vocabulary] float32, on the CPU."""
    count = len(TOKENS)
    ids = torch.tensor([TOKENS], device="cuda")
    mask = torch.ones(count, count, device="cuda").triu(1).bool()[None, None]
    out = model(ids, torch.arange(count, device="cuda")[None], mask)
    return out[0].float().cpu()


def main(action: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    megatron.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    model = build()
    group = megatron.parallel_state.get_data_parallel_group(with_context_parallel=True)
    if action == "save":
        draw_weights(model)
        path = folder / "saved" / "iter_0000100"
        path.mkdir(parents=True)
        state = {
            "model": model.sharded_state_dict(metadata={"dp_cp_group": group}),
            "args": Namespace(**ARGUMENTS),
            "checkpoint_version": 3.0,
            "iteration": 100,
        }
        dist_checkpointing.save(state, str(path))
        (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("100")
        torch.save(logits_of(model), folder / "logits")
    else:
        path = folder / "again" / "release"
        metadata = dist_checkpointing.load_content_metadata(str(path)) | {"dp_cp_group": group}
        state = dist_checkpointing.load(
            {"model": model.sharded_state_dict(metadata=metadata)}, str(path), strict="log_all"
        )
        model.load_state_dict(state["model"], strict=False)
        torch.save(logits_of(model), folder / "logits2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
