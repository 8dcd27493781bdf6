"""One rank of a tensor-parallel engine: generates and saves tokens and cached tokens.

torchrun --nproc-per-node 2 -m tests.parallel.engine_worker OUTPUT_FOLDER MODEL_FOLDER...
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from megatron_hybrid import LLM, SamplingParams

Answers = dict[str, list[list[Any]]]


def generate_all(folder: str, *, tensor_model_parallel_size: int) -> Answers:
    """[tokens, cached tokens] of each prompt, cold, warm, and sampled in chunks."""
    rng = random.Random(0)
    shared = [rng.randrange(160) for _ in range(60)]
    prompts = [shared[:n] + [rng.randrange(160) for _ in range(n % 7)] for n in range(30, 60, 3)]
    options = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "inference_dynamic_batching_block_size": 16,
        "inference_dynamic_batching_buffer_size_gb": 0.01,
        "inference_dynamic_batching_max_requests": 6,
        "inference_dynamic_batching_prefix_caching_mamba_gb": 0.002,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    llm = LLM(folder, **options)
    answers = {}
    for name in ("cold", "warm"):
        outputs = llm.generate(prompts, greedy, progress=False)
        answers[name] = [[output.token_ids, output.cached_tokens] for output in outputs]
    chunked = LLM(folder, **options, inference_dynamic_batching_max_tokens=25)
    sampled = SamplingParams(temperature=0.8, top_k=10, seed=3, max_tokens=6)
    outputs = chunked.generate(prompts, sampled, progress=False)
    answers["sampled"] = [[output.token_ids, output.cached_tokens] for output in outputs]
    return answers


def main() -> None:
    output, *folders = sys.argv[1:]
    answers = {
        Path(folder).name: generate_all(folder, tensor_model_parallel_size=2) for folder in folders
    }
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
