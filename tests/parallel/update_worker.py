"""One rank of a tensor-parallel engine whose weights change: saves tokens and cached tokens.

torchrun --nproc-per-node 2 -m tests.parallel.update_worker OUTPUT_FOLDER FOLDER_A FOLDER_B...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.errors import WeightsError

PROMPTS = [list(range(3 + i, 60 + 7 * i)) for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def answers(llm: LLM) -> list[list[Any]]:
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    return [[output.token_ids, output.cached_tokens] for output in outputs]


def make(folder: str, ranks: int) -> LLM:
    return LLM(
        folder,
        tensor_model_parallel_size=ranks,
        inference_dynamic_batching_block_size=16,
        inference_dynamic_batching_buffer_size_gb=0.02,
        inference_dynamic_batching_max_requests=4,
    )


def update(a: str, b: str) -> dict[str, Any]:
    """A on two ranks, then B: from its folder with a stream open, and from tensors."""
    llm = make(a, 2)
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"a": answers(llm), "fingerprints": [llm.system_fingerprint]}
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.update_weights(b)
    found["stream"] = list(stream)[-1].token_ids
    found["b"] = answers(llm)
    found["fingerprints"].append(llm.system_fingerprint)
    tensors = load_file(f"{a}/model.safetensors")
    wrong = dict(tensors)
    if rank == 1:  # one rank refuses: no rank may change anything
        wrong["x"] = wrong[
            "model.norm.weight" if "model.norm.weight" in wrong else next(iter(wrong))
        ]
    try:
        llm.update_weights(wrong)
    except WeightsError as error:
        found["refused"] = (
            "another rank" in str(error).lower() if rank == 0 else "'x'" in str(error)
        )
    found["still b"] = [tokens for tokens, _ in answers(llm)]
    llm.update_weights(tensors)
    found["a again"] = answers(llm)
    found["fingerprints"].append(llm.system_fingerprint)
    return found


def main() -> None:
    output, *folders = sys.argv[1:]
    found = {Path(a).name: update(a, b) for a, b in zip(folders[::2], folders[1::2], strict=True)}
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
