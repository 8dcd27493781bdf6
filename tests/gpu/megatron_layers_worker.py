"""tests.training.megatron_comparison on a GPU, in bfloat16, with mamba_ssm's kernels in Megatron's
Mamba layers.

    python -m tests.gpu.megatron_layers_worker FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

# One tiling of each of mamba-ssm's kernels, which it would choose among many for minutes.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")

import torch
import torch.distributed as dist

import megatron_hybrid.parallel.megatron as megatron
from convert.conversion import to_hugging_face
from megatron_hybrid import LLM
from tests.gpu import megatron_hybrid_model
from tests.training.megatron_comparison import compare

CONFIG = {
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "moe_router_dtype": "fp32",  # as the engine's router
    "attention_softmax_in_fp32": True,
}
OPTIONS = {
    "batch_invariant": True,
    "dtype": "bfloat16",
    "inference_dynamic_batching_buffer_size_gb": 0.2,
    "inference_dynamic_batching_max_requests": 16,
    "inference_dynamic_batching_num_cuda_graphs": 2,
}


def main(folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    megatron.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    megatron_hybrid_model.CONFIG.update(CONFIG)
    model = megatron_hybrid_model.build()
    megatron_hybrid_model.draw_weights(model)
    model.to(torch.bfloat16)  # as Megatron's Float16Module does
    group = megatron.parallel_state.get_data_parallel_group(with_context_parallel=True)

    def saved(part: str) -> str:
        path = folder / part / "iter_0000100"
        path.mkdir(parents=True)
        state = {
            "model": model.sharded_state_dict(metadata={"dp_cp_group": group}),
            "args": Namespace(**megatron_hybrid_model.ARGUMENTS),
            "checkpoint_version": 3.0,
            "iteration": 100,
        }
        dist_checkpointing.save(state, str(path))
        (folder / part / "latest_checkpointed_iteration.txt").write_text("100")
        to_hugging_face(folder / part, folder / f"{part}-hf", progress=False)
        return str(folder / f"{part}-hf")

    found = compare(model, lambda path: LLM(path, **OPTIONS), saved)
    (folder / "found.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
