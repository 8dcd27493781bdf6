"""One rank of a server's engine that computes prompts, or of one that goes on from them.

torchrun --nproc-per-node N -m tests.disaggregation.ranks_worker OUTPUT_FOLDER ROLE TENSOR \\
    PIPELINE HOST:PORT MODEL_FOLDER SHARED_FOLDER

The first one says that it has computed them by a file in the shared folder, then computes a long
one that the other one reads meanwhile, and ends when there is another file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.disaggregation import peer_prefixes, peers
from megatron_hybrid.engine import build_host_memory
from megatron_hybrid.parallel import RankGroup, initialize
from megatron_hybrid.rank_layout import ParallelSizes
from tests.disaggregation.engines import PREFIX, answers, options

FIRST = SamplingParams(max_tokens=1, temperature=0.0)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(160) for _ in range(60 + 7 * i)] for i in range(6)]


def long_prompt() -> list[int]:
    rng = random.Random(6)
    return [rng.randrange(160) for _ in range(400)]


def compute(llm: LLM, shared: Path) -> None:
    """Slowly, step by step."""
    answers(llm, prompts(), params=FIRST)
    llm.engine.add_request("long", long_prompt(), FIRST)
    (shared / "computed").touch()
    while llm.engine.has_work():
        time.sleep(0.1)
        llm.engine.step()


def answer(llm: LLM, address: str, ranks: RankGroup) -> dict[str, Any]:
    """The tokens of all prompts, how many of each were skipped, and of the long one the bytes that
    were read while it was computed."""
    transfers, tokens = llm.engine.context.transfers, np.array(long_prompt(), dtype=np.int32)
    transfers.read_ahead("here", tokens, "", address, "long")
    while not ranks.broadcast_object(transfers.is_read_ahead("here")):
        llm.engine.use_idle_time()
        time.sleep(0.005)
    ahead = llm.stats()["tier_bytes_fetched"]["peers"]
    return {"found": answers(llm, [*prompts(), long_prompt()], address), "ahead": ahead}


def main() -> None:
    output, role, tensor, pipeline, address, folder, shared = sys.argv[1:]
    build_host_memory._OPERATIONS["cpu"] = 1e6  # on which a copy pays
    # A machine that stands still for a while is not what is tested.
    peer_prefixes.FIND_SECONDS = peer_prefixes.HELLO_SECONDS = 20.0
    peer_prefixes.READ_SECONDS = peer_prefixes.PeerPrefixes.patience = 50.0
    peers.CONNECT_MILLISECONDS = 20_000
    flag = "disaggregation_listen" if role == "prefill" else "disaggregation_peers"
    llm = LLM(
        **options(
            folder,
            role=role,
            tensor_model_parallel_size=int(tensor),
            pipeline_model_parallel_size=int(pipeline),
            **{flag: address, PREFIX + "block_size": 16, PREFIX + "max_tokens": 64},
        )
    )
    found: dict[str, Any] = {}
    parallel = initialize(ParallelSizes(int(tensor), int(pipeline)))
    if role == "prefill":
        compute(llm, Path(shared))
        while not parallel.replica.broadcast_object(Path(shared, "answered").exists()):
            if not llm.engine.use_idle_time():
                time.sleep(0.005)
        llm.engine.check_integrity()
    else:
        while not Path(shared, "computed").exists():
            time.sleep(0.05)
        found = answer(llm, address, parallel.replica)
        Path(shared, "answered").touch()
    llm.engine.context.transfers.lower.close()  # type: ignore[attr-defined]
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
