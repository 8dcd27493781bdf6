"""One rank of a pipeline: logits of models, and answers of engines on a cache of a fixed size.

torchrun --nproc-per-node N -m tests.parallel.pipeline_worker OUTPUT_FOLDER TENSOR PIPELINE
    (logits:MODEL_FOLDER | engine:MODEL_FOLDER | adjusted)...
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from megatron_hybrid.engine import build
from megatron_hybrid.execution.pipeline import PipelineStage
from megatron_hybrid.layers.inputs import LayerCaches, StepInputs
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from megatron_hybrid.rank_layout import ParallelSizes
from tests.engine.adjusted_cases import CASES, CHAT
from tests.engine.adjusted_cases import OPTIONS as ADJUSTED
from tests.parallel.worker import mixed_steps

BLOCK_SIZE = 16
OPTIONS = {
    "device": "cpu",
    "inference_dynamic_batching_block_size": BLOCK_SIZE,
    "inference_dynamic_batching_max_requests": 6,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class StagedModel:
    """What the tests' driver takes for a model: each rank computes its stage of a step."""

    def __init__(self, model: HybridModel) -> None:
        self.kv_specs, self.state_specs = model.kv_specs, model.state_specs
        self._model = model
        self._stage = PipelineStage(model, torch.device("cpu"), 200)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: LayerCaches) -> Tensor:
        """Logits; [rows, 0] on stages that have none."""
        step = self._model.plan(inputs, caches)
        self._stage.receive(inputs)
        logits = self._stage.compute(inputs, step)
        self._stage.send(inputs)
        return logits


def logits_of(folder: str, parallel: ParallelContext) -> Tensor:
    model = load_model(
        folder, device=torch.device("cpu"), dtype=None, parallel=parallel, progress=False
    )
    return mixed_steps(StagedModel(model))  # type: ignore[arg-type]


@contextmanager
def caches_of(**sizes: int) -> Iterator[None]:
    """Engines get caches of these sizes: what memory pays for differs from stage to stage."""
    derived = build._geometry

    def fixed(*arguments: Any, **keywords: Any) -> Any:
        return replace(derived(*arguments, **keywords), **sizes)

    with patch.object(build, "_geometry", fixed):
        yield


def answers_of(folder: str, tensor: int, pipeline: int, update: str | None) -> dict[str, Any]:
    """Tokens and cached tokens of each prompt, in every way that an engine computes them; and what
    it decided by. `update`: a folder of other weights for the same model."""
    rng = random.Random(0)
    shared = [rng.randrange(160) for _ in range(60)]
    prompts = [shared[:n] + [rng.randrange(160) for _ in range(n % 7)] for n in range(30, 60, 3)]
    options = OPTIONS | {
        "load": folder,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
    }
    with caches_of(num_blocks=60, num_cached_slots=12):
        llm = LLM(**options)
        chunked = LLM(**options, inference_dynamic_batching_max_tokens=25)
        broken = LLM(**options, prefill_checkpoint_mode="break")
    with caches_of(num_blocks=11, num_cached_slots=2, max_requests=3):
        small = LLM(**options)
    found: dict[str, Any] = {"geometry": asdict(llm.engine.context.geometry)}

    def generate(llm: LLM, params: SamplingParams, count: int = len(prompts)) -> list[Any]:
        outputs = llm.generate(prompts[:count], params, progress=False)
        llm.engine.check_integrity()
        return [
            [choice.token_ids, choice.cached_tokens] for out in outputs for choice in out.choices
        ]

    found["cold"] = generate(llm, GREEDY)
    llm.engine.dummy_forward()
    found["warm"] = generate(llm, GREEDY)
    llm.engine.runner.asynchronous = True
    llm.engine.reset()
    found["in flight"] = generate(llm, GREEDY)
    llm.engine.runner.asynchronous = False
    drawn = replace(GREEDY, temperature=0.8, top_k=10, seed=3)
    found["chunked, drawn"] = generate(chunked, drawn)
    found["broken"] = generate(broken, GREEDY, 3)
    found["choices"] = generate(llm, replace(drawn, n=3), 4)
    penalised = replace(drawn, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=4)
    found["penalised"] = generate(llm, penalised, 4)
    found["preempted"] = generate(small, replace(GREEDY, max_tokens=30))
    found["preemptions"] = small.stats()["preemptions"]
    found["resumed"] = llm.stats()["skipped_tokens"]
    told = replace(GREEDY, max_tokens=3, logprobs=2)
    # the first ones' prompts are cached to their ends, with the logits there
    outputs = llm.generate(prompts[:2], told, progress=False)
    outputs += llm.generate(prompts[:2], replace(told, prompt_logprobs=1), progress=False)
    found["log-probabilities"] = [_told(output) for output in outputs]
    if update is not None:
        llm.update_weights(update)
        found["updated"] = generate(llm, GREEDY, 3)
    return found


def _told(output: RequestOutput) -> list[Any]:
    entries = (output.prompt_logprobs or []) + (output.logprobs or [])
    return [[one.token_id, one.logprob, one.top] for one in entries if one is not None]


def adjusted_answers(tensor: int, pipeline: int) -> dict[str, list[Any]]:
    """[tokens, why it ended] of answers with penalties, biases, bans and grammars, all at once, by
    the model that ships."""
    options = ADJUSTED | {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
    }
    outputs = LLM(**options).chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
    return {
        name: [output.token_ids, output.finish_reason]
        for name, output in zip(CASES, outputs, strict=True)
    }


def main() -> None:
    output, tensor, pipeline = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    parallel = initialize(ParallelSizes(tensor, pipeline), device=torch.device("cpu"))
    found: dict[str, Any] = {}
    for task in sys.argv[4:]:
        kind, _, folder = task.partition(":")
        if kind == "logits":
            logits = logits_of(folder, parallel)
            if parallel.pipeline.is_last:
                torch.save(logits, output / f"{Path(folder).name}.{parallel.tensor.rank}.pt")
        elif kind == "engine":
            folder, _, update = folder.partition(",")
            found[Path(folder).name] = answers_of(folder, tensor, pipeline, update or None)
        else:
            found[kind] = adjusted_answers(tensor, pipeline)
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
