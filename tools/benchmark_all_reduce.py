#!/usr/bin/env python
"""How long the tensor-parallel ranks of one host take to add up their activations.

    torchrun --nproc-per-node 2 tools/benchmark_all_reduce.py --width 4096

Microseconds a call in a captured CUDA graph, for rows of so many bfloat16 values: the sum, the
residual and the norm in one kernel, as the model does it; torch's one-shot all-reduce over
symmetric memory, then the norm; NCCL's all-reduce, then the norm; NCCL's all-reduce alone. Then for
logits of --vocab-size that each rank has its part of: gathered in one kernel, and by NCCL.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.kernels.norm import triton as norm
from megatron_hybrid.parallel import RankGroup, initialize

CALLS, REPLAYS = 20, 20
ROWS = (1, 8, 32, 64, 128, 256, 512)
FEW_ROWS = ROWS[:4]
EPS = 1e-5


def microseconds(ranks: RankGroup, call: Callable[[], object]) -> float:
    for _ in range(3):  # compiles what is not compiled yet
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / (CALLS * REPLAYS)


def sums(fast: RankGroup, nccl: RankGroup, x: Tensor) -> list[Callable[[], object]]:
    residual, weight = x.clone(), torch.ones_like(x[0])
    shared = fast.shared_rows(x.shape[0], x.shape[1], x.dtype)
    assert shared is not None

    def add_norm(values: Tensor) -> object:
        return norm.add_rms_norm(values, residual, 0.0, weight, EPS)

    return [
        lambda: norm.add_rms_norm_over_ranks(x, residual, 0.0, weight, EPS, None, shared),
        lambda: add_norm(fast.all_reduce(x)),
        lambda: add_norm(nccl.all_reduce(x)),
        lambda: nccl.all_reduce(x),
    ]


def gathers(fast: RankGroup, nccl: RankGroup, x: Tensor) -> list[Callable[[], object]]:
    return [lambda: fast.all_gather(x), lambda: nccl.all_gather(x)]


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096, help="values in a row (default: 4096)")
    parser.add_argument("--vocab-size", type=int, default=131072, help="default: 131072")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2 or "RANK" not in os.environ:
        parser.error("start it with torchrun on a machine with several GPUs.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    parallel = initialize(int(os.environ["WORLD_SIZE"]), device=device)
    fast, nccl = parallel.tensor, RankGroup(parallel.tensor.group, device)
    if fast.shared_rows(1, args.width, torch.bfloat16) is None:
        print("These GPUs can't read one another's memory.", file=sys.stderr)
        return 1
    for names, ways, width, counts in (
        ("rows | one kernel | torch's, norm | NCCL's, norm | NCCL's", sums, args.width, ROWS),
        ("rows of logits | one kernel | NCCL's", gathers, args.vocab_size // fast.size, FEW_ROWS),
    ):
        if fast.is_first:
            print(f"\n| {names} |\n|" + "---|" * (names.count("|") + 1))
        for rows in counts:
            x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
            times = [f"{microseconds(fast, way):.1f}" for way in ways(fast, nccl, x)]
            if fast.is_first:
                print(f"| {rows} | {' | '.join(times)} |", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
