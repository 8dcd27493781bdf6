"""tests.training.megatron_comparison in one process on a CPU, in float32 and in bfloat16. What
needs a GPU, mamba_ssm's kernels, is stood in for by plain torch.

    python -m tests.training.megatron_layers_worker FOLDER
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
from functools import partial
from pathlib import Path
from typing import Any

import tests.models.megatron_worker as megatron_worker  # stands in for what a GPU needs

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor

from convert.conversion import to_hugging_face
from megatron_hybrid import LLM
from tests.engine.bits import OPTIONS
from tests.models.megatron_models import MODELS
from tests.training.megatron_comparison import compare

DESCRIPTION = MODELS["hybrid_ep2"]
PATTERN = "M-*EM"


def description(dtype: torch.dtype) -> dict[str, Any]:
    config = DESCRIPTION["config"] | {
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "moe_router_dtype": "fp32",  # as the engine's router
        "attention_softmax_in_fp32": True,
    }
    arguments = DESCRIPTION["arguments"] | {"hybrid_layer_pattern": PATTERN}
    own = {"ep": 1, "pattern": PATTERN, "config": config, "arguments": arguments}
    return DESCRIPTION | own


class RoundedNorm(megatron_worker.GatedNorm):
    """mamba_ssm's, which computes in float32."""

    def __init__(self, *args: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight.data = self.weight.data.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def rounded_scan(
    scan: Any, zxbcdt: Tensor, conv: Tensor, bias: Tensor, *others: Tensor, **options: Any
) -> Tensor:
    """The result is gated, and rounded then, as mamba_ssm's."""
    wide: Tensor = scan(zxbcdt.float(), conv.float(), bias.float(), *others, **options)
    return wide.to(zxbcdt.dtype)


def compared(dtype: torch.dtype, folder: Path) -> Any:
    name, described = str(dtype).removeprefix("torch."), description(dtype)
    with megatron_worker.built(described) as model:
        megatron_worker.draw_weights(model)
        model.to(dtype)  # as Megatron's Float16Module does

        def saved(part: str) -> str:
            path = folder / f"{name}-{part}"
            megatron_worker.save(model, described, path)
            to_hugging_face(path, folder / f"{name}-{part}-hf", progress=False)
            return f"{path}-hf"

        return compare(model, lambda path: LLM(path, dtype=name, **OPTIONS), saved)


def main(folder: Path) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    stand_in: Any = megatron_worker
    stand_in.mamba_scan = partial(rounded_scan, megatron_worker.mamba_scan)
    stand_in.GatedNorm = RoundedNorm
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    filesystem._get_write_results_queue = queue.Queue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {
        "float32": compared(torch.float32, folder),
        "bfloat16": compared(torch.bfloat16, folder),
    }
    (folder / "found.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
