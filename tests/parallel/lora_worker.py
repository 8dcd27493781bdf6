"""One rank of engines with adapters, split over tensor or pipeline ranks: saves tokens.

torchrun --nproc-per-node 2 -m tests.parallel.lora_worker OUTPUT_FOLDER SPLIT FOLDER...

SPLIT: the flag of which 2 is given, tensor_model_parallel_size for instance. Each folder has a
model and two adapters. "wide layers": as on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.engine import build_adapters
from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.adapters.peft_adapter import CONFIG, WEIGHTS

PROMPTS = [list(range(3 + i, 40 + 7 * i)) for i in range(4)]
ADAPTERS = ["", "wide", "narrow", "wide"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def answers(llm: LLM) -> list[list[Any]]:
    """Tokens and cached tokens, cold and warm."""
    outputs = [
        output
        for _ in range(2)
        for output in llm.generate(PROMPTS, GREEDY, adapter=ADAPTERS, progress=False)
    ]
    return [[output.token_ids, output.cached_tokens] for output in outputs]


def make(folder: Path, **options: Any) -> LLM:
    llm = LLM(
        str(folder / "model"),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        inference_dynamic_batching_block_size=16,
        inference_dynamic_batching_buffer_size_gb=0.02,
        inference_dynamic_batching_max_requests=4,
        **options,
    )
    for name in ("wide", "narrow"):
        llm.load_adapter(name, folder / name)
    return llm


def refused_by_one(llm: LLM, folder: Path) -> bool:
    """Whether an adapter that does not fit on one rank is refused on both, with the others as they
    were."""
    config = json.loads((folder / "wide" / CONFIG).read_text())
    tensors = load_file(folder / "wide" / WEIGHTS)
    if os.environ["RANK"] == "1":
        tensors[next(iter(tensors))] = tensors.pop(next(iter(tensors)))[:2]
    try:
        llm.load_adapter("wide", tensors, config)
    except WeightsError:
        return True
    return False


def main() -> None:
    output, split, *folders = sys.argv[1:]
    found: dict[str, Any] = {}
    saves_launches = build_adapters.saves_launches
    for folder in map(Path, folders):
        llm = make(folder, **{split: 2})
        found[folder.name] = answers(llm)
        assert refused_by_one(llm, folder)
        found[f"{folder.name} again"] = answers(llm)
        build_adapters.saves_launches = lambda device: True
        found[f"{folder.name}, wide layers"] = answers(make(folder, **{split: 2}))
        build_adapters.saves_launches = saves_launches
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
