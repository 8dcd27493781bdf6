"""One rank of a tensor-parallel engine: generates and saves tokens and cached tokens.

torchrun --nproc-per-node 2 -m tests.parallel.engine_worker \\
    OUTPUT_FOLDER FOLDER_OF_A_MODEL_WITH_A_HEAD MODEL_FOLDER...
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from tests.engine.adjusted_cases import CASES, CHAT, OPTIONS

Answers = dict[str, list[list[Any]]]


def generate_all(folder: str, *, tensor_model_parallel_size: int) -> Answers:
    """[tokens, cached tokens] of each prompt: cold, warm, cold with a step in flight, sampled in
    chunks, several samples of one prompt, from a cache so small that requests are preempted, from
    packed states, and with drafts."""
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
    for name in ("cold", "warm", "in flight"):
        if name == "in flight":
            llm.engine.runner.asynchronous = True
            llm.engine.reset()
        outputs = llm.generate(prompts, greedy, progress=False)
        answers[name] = [[output.token_ids, output.cached_tokens] for output in outputs]
    llm.engine.runner.asynchronous = False
    chunked = LLM(folder, **options, inference_dynamic_batching_max_tokens=25)
    sampled = SamplingParams(temperature=0.8, top_k=10, seed=3, max_tokens=6)
    outputs = chunked.generate(prompts, sampled, progress=False)
    answers["sampled"] = [[output.token_ids, output.cached_tokens] for output in outputs]
    several = SamplingParams(temperature=0.8, seed=3, max_tokens=6, n=3)
    outputs = llm.generate(prompts[:4], several, progress=False)
    choices = [choice for output in outputs for choice in output.choices]
    answers["choices"] = [[choice.token_ids, choice.cached_tokens] for choice in choices]
    answers["preempted"] = _preempted(folder, options, prompts)
    packed = LLM(folder, **options, mamba_inference_cached_states_dtype="int8")
    for name in ("packed", "unpacked"):
        outputs = packed.generate(prompts, greedy, progress=False)
        answers[name] = [[output.token_ids, output.cached_tokens] for output in outputs]
    repeated = [prompt[:9] * 3 for prompt in prompts]
    spared = {"mamba_inference_state_write_interval": 3}
    return answers | with_drafts(folder, repeated, num_speculative_tokens=3, **spared, **options)


def with_drafts(folder: str, prompts: list[list[int]], **options: Any) -> Answers:
    drafting = LLM(folder, **options)
    longer = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = drafting.generate(prompts, longer, progress=False)
    stats = drafting.stats()
    return {
        "drafts": [[output.token_ids, output.cached_tokens] for output in outputs],
        "accepted": [[stats["accepted_tokens"], stats["draft_tokens"]]],
    }


def with_drafts_of_its_head(folder: str, *, tensor_model_parallel_size: int) -> Answers:
    rng = random.Random(1)
    return with_drafts(
        folder,
        [[rng.randrange(160) for _ in range(n)] for n in (3, 18, 34, 50)],
        drafter="heads",
        num_speculative_tokens=4,
        tensor_model_parallel_size=tensor_model_parallel_size,
        mamba_inference_state_write_interval=4,
        inference_dynamic_batching_buffer_size_gb=0.01,
        inference_dynamic_batching_max_requests=6,
    )


def _preempted(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> list[list[Any]]:
    geometry = LLM(folder, **options).engine.context.geometry
    live = 3 * geometry.bytes_per_slot
    small = LLM(
        folder,
        **options
        | {
            "inference_dynamic_batching_max_requests": 3,
            "inference_dynamic_batching_buffer_size_gb": (
                (12 * geometry.bytes_per_block + live + 1) / GIB
            ),
            "inference_dynamic_batching_prefix_caching_mamba_gb": (
                (2 * geometry.bytes_per_slot + 1) / GIB
            ),
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = small.generate(prompts, params, progress=False)
    small.engine.check_integrity()
    assert small.stats()["preemptions"] > 0
    return [[output.token_ids, output.cached_tokens] for output in outputs]


def adjusted_answers(*, tensor_model_parallel_size: int) -> dict[str, list[Any]]:
    """[tokens, why it ended] of answers with penalties, biases, bans and grammars, all at once, by
    the model that ships."""
    options = OPTIONS | {"tensor_model_parallel_size": tensor_model_parallel_size}
    outputs = LLM(**options).chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
    return {
        name: [output.token_ids, output.finish_reason]
        for name, output in zip(CASES, outputs, strict=True)
    }


def main() -> None:
    output, head, *folders = sys.argv[1:]
    answers: dict[str, Any] = {
        Path(folder).name: generate_all(folder, tensor_model_parallel_size=2) for folder in folders
    }
    answers["head"] = with_drafts_of_its_head(head, tensor_model_parallel_size=2)
    answers["adjusted"] = adjusted_answers(tensor_model_parallel_size=2)
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
