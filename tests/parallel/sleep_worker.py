"""One rank of a tensor-parallel engine that sleeps: saves tokens, and what could not be.

torchrun --nproc-per-node 2 -m tests.parallel.sleep_worker OUTPUT_FOLDER FOLDER_A FOLDER_B
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.errors import SleepError
from megatron_hybrid.memory import moving
from megatron_hybrid.memory.arena import Arena

PROMPTS = [list(range(3 + i, 60 + 7 * i)) for i in range(3)]
LONG = [list(range(5, 150))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def make(folder: str, ranks: int, **options: Any) -> LLM:
    return LLM(
        folder,
        tensor_model_parallel_size=ranks,
        inference_dynamic_batching_block_size=16,
        inference_dynamic_batching_buffer_size_gb=0.02,
        inference_dynamic_batching_max_requests=4,
        **options,
    )


def fall_asleep(a: str, b: str) -> dict[str, Any]:
    moving.LEAST_BYTES = 512  # a tiny model's weights are all small
    llm = make(a, 2, enable_sleep_mode=True, prefix_caching_host_gb=0.02)
    rank, found = int(os.environ["RANK"]), dict[str, Any]()
    llm.engine.context.transfers.tier._bytes_per_token = 1e12  # type: ignore[attr-defined]
    found["before"] = answers(llm)
    llm.generate(LONG, GREEDY, progress=False)
    while llm.engine.use_idle_time():
        pass
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.sleep()
    restore = Arena.restore
    if rank == 1:  # on which somebody else has taken the memory

        def fails(arena: Arena) -> None:
            raise MemoryError("there is none")

        Arena.restore = fails  # type: ignore[method-assign]
    try:
        llm.wake_up(["weights"])
    except SleepError as error:
        found["refused"] = ("another rank" in str(error)) == (rank == 0)
    found["asleep"] = llm.engine.sleeping
    Arena.restore = restore  # type: ignore[method-assign]
    llm.wake_up()
    found["stream"] = list(stream)[-1].token_ids
    (output,) = llm.generate(LONG, GREEDY, progress=False)
    found["from the host"] = output.cached_tokens
    found["level 1"] = answers(llm)
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.update_weights(b)
    llm.wake_up(["kv_cache"])
    found["level 2"] = answers(llm)
    return found


def main() -> None:
    output, a, b = sys.argv[1:]
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(fall_asleep(a, b)))


if __name__ == "__main__":
    main()
