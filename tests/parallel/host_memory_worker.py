"""One rank of an engine with memory of the host, and files below it: chats, and chats after a
restart.

torchrun --nproc-per-node N -m tests.parallel.host_memory_worker OUTPUT_FOLDER TENSOR PIPELINE \\
    MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.cache.stored_prefixes import StoredPrefixes
from megatron_hybrid.cache.stores.disk import DiskStore
from megatron_hybrid.engine import build_host_memory
from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.errors import StoreError
from megatron_hybrid.execution.host_copies import HostCopier
from tests.parallel.pipeline_worker import caches_of

CHATS, TURNS = 9, 3
OPTIONS = {
    "device": "cpu",
    "inference_dynamic_batching_block_size": 8,
    "inference_dynamic_batching_max_requests": 2,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
    "prefix_caching_host_gb": 0.02,
    "prefix_caching_disk_gb": 0.5,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class SlowCopier(HostCopier):
    """Whose copies take as many looks as each rank draws for itself."""

    draws = random.Random(os.environ.get("RANK"))

    def write(self, copy: Copy) -> Any:
        super().write(copy)
        return SlowTicket(self.draws.randrange(4))

    def fetch(self, copy: Copy) -> Any:
        super().fetch(copy)
        return SlowTicket(self.draws.randrange(4))


class SlowTicket:
    def __init__(self, looks: int) -> None:
        self._looks = looks

    def is_done(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class FailingStore(DiskStore):
    """Which fails now and then, on each rank by itself."""

    draws = random.Random(os.environ.get("RANK"))

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        time.sleep(self.draws.random() / 500)
        if self.draws.random() < 0.01:
            raise StoreError("The store failed.")
        return super().get(key, parts)


def answers_of(folder: str, files: str, tensor: int, pipeline: int) -> dict[str, Any]:
    """Tokens of chats, turn by turn; those of a second start, and how many it skipped."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    options = OPTIONS | sizes | {"load": folder, "prefix_caching_disk": files}
    rng = random.Random(3)
    texts = [[rng.randrange(160) for _ in range(30 + 3 * i)] for i in range(CHATS)]
    found: dict[str, Any] = {}
    with caches_of(num_blocks=40, num_cached_slots=4):
        first, second = LLM(**options), LLM(**options)
    found["chats"] = [ask(first, texts, rng) for _ in range(TURNS)]
    settle(first)
    found["restarted"] = ask(second, texts, rng)
    settle(second)
    counts = [llm.stats()["tier_fetches"] for llm in (first, second)]
    found["fetched"] = [counts[0]["host"], counts[1]["disk"]]
    return found


def ask(llm: LLM, texts: list[list[int]], rng: random.Random) -> list[list[int]]:
    outputs = llm.generate(texts, PARAMS, progress=False)
    llm.engine.check_integrity()
    for text, output in zip(texts, outputs, strict=True):
        text += output.token_ids + [rng.randrange(160) for _ in range(4)]
    return [output.token_ids for output in outputs]


def settle(llm: LLM) -> None:
    """What is to be in files is there."""
    transfers = llm.engine.context.transfers
    assert isinstance(transfers, HostTransfers) and isinstance(transfers.lower, LowerTransfers)
    while llm.engine.use_idle_time() or transfers.lower.is_underway:
        time.sleep(0.001)
    llm.engine.check_integrity()


def main() -> None:
    output, tensor, pipeline, folder = sys.argv[1:]
    build_host_memory.HostCopier = SlowCopier  # type: ignore[misc]
    build_host_memory.DiskStore = FailingStore  # type: ignore[misc]
    build_host_memory._OPERATIONS["cpu"] = 1e6  # on which reading pays
    StoredPrefixes.pause = 0.01
    found = answers_of(folder, f"{output}/files", int(tensor), int(pipeline))
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
