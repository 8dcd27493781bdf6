#!/usr/bin/env python
"""Simulates replicas behind a router: what each way of placing requests skips, and its times.

    python tools/simulate_replicas.py
    python tools/simulate_replicas.py --replicas 4 --open-chats 256 --clients 32 --kill
    python tools/simulate_replicas.py --costs gpu --spread 0.7 --routers longest_prefix cache_aware
    python tools/simulate_replicas.py --costs gpu --seeds 0 --replicas 1000 --systems 1000 \
        --clients 8000 --open-chats 32000 --requests 500000 --routers longest_prefix dynamo_kv

Real schedulers and caches, with the memory that tools/benchmark_replicas.py gives a replica of the
reference model; a clock takes the place of the model, so that a run depends on its seed alone. A
row's times are ratios to the first router's, geometric means over the seeds: of the mean and the
95th percentile of first tokens, of whole answers and of the whole run. "of prompts" is the share of
prompt tokens that were skipped, "points" how much that is above the first router's, with the
standard error over the seeds. "busiest" is how many times the mean of requests one replica got,
"placing" the real microseconds that a router took for a request.

The last command takes six minutes a router. coordinator, which decides as longest_prefix does,
first_prefix_block, cache_aware and rendezvous look at one replica after another: not for so many.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hybrid.arguments import ArgumentParser
from simulation.replicas import COSTS, REFERENCE, Chats, Replicas, RoutingResult
from simulation.routers import ROUTERS

JOINT = "joint_memory"  # a replica with the memory of all
SIZES = (
    *("requests", "turns", "systems", "system_tokens", "documents", "document_tokens"),
    *("turn_tokens", "answer_tokens", "clients"),
)
ROWS = [*ROUTERS, JOINT]
HEADER = (
    f"{'costs':5} {'chats':>5} {'router':24} {'of prompts':>10} {'points':>13} {'first':>6} "
    f"{'p95':>6} {'answer':>6} {'run':>6} {'moved':>6} {'busiest':>7} {'failed':>6} "
    f"{'placing':>7}"
)


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = Chats()
    for name in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(shown, name))
    parser.add_argument("--open-chats", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--spread", type=float, default=0.0, help="of lengths' logarithms")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds of a client's pause")
    parser.add_argument("--bursts", action="store_true", help="clients ask again together")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--costs", nargs="+", choices=[*COSTS], default=["cpu", "gpu"])
    parser.add_argument("--routers", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--kill", action="store_true", help="the last replica, midway")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the terminal")
    args = parser.parse_args()
    gc.disable()  # nothing here refers to itself, and looking for it takes a third of the time
    print(HEADER, flush=True)
    rows: list[dict[str, Any]] = []
    for costs in args.costs:
        for open_chats in args.open_chats:
            first: list[RoutingResult] = []
            for router in args.routers:
                results = [_run(args, router, costs, open_chats, seed) for seed in args.seeds]
                first = first or results
                replicas = 1 if router == JOINT else args.replicas
                row = {"costs": costs, "chats": open_chats, "router": router}
                rows.append({**row, **compared(results, first, replicas)})
                _show(rows[-1])
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _run(
    args: argparse.Namespace, router: str, costs: str, open_chats: int, seed: int
) -> RoutingResult:
    sizes = {name: getattr(args, name) for name in SIZES}
    more = {"spread": args.spread, "think": args.think, "bursts": args.bursts}
    chats = Chats(open_chats=open_chats, seed=seed, **sizes, **more)
    geometry, replicas, kill = REFERENCE, args.replicas, args.kill
    if router == JOINT:
        geometry = replace(
            geometry,
            num_blocks=replicas * geometry.num_blocks,
            num_cached_slots=replicas * geometry.num_cached_slots,
        )
        router, replicas, kill = "load_balanced", 1, False
    placing = ROUTERS[router](geometry, replicas)
    return Replicas(
        chats, placing, replicas, geometry=geometry, costs=COSTS[costs], kill=kill
    ).run()


def compared(
    results: Sequence[RoutingResult], first: Sequence[RoutingResult], replicas: int
) -> dict[str, Any]:
    """Means over the seeds, of times as ratios to another router's results with the same seeds."""
    shares = [100 * one.skipped_tokens / one.prompt_tokens for one in results]
    points = np.subtract(shares, [100 * one.skipped_tokens / one.prompt_tokens for one in first])
    logs = np.log([_times(one) for one in results]) - np.log([_times(one) for one in first])
    return {
        "skipped": float(np.mean(shares)),
        "points": float(points.mean()),
        "error": float(points.std(ddof=1) / np.sqrt(len(points))) if len(points) > 1 else 0.0,
        **dict(zip(("first", "p95", "answer", "run"), np.exp(logs.mean(axis=0)), strict=True)),
        "moved": float(np.mean([one.moved for one in results])),
        "busiest": float(np.mean([_busiest(one, replicas) for one in results])),
        "failed": float(np.mean([one.failed for one in results])),
        "placing": float(np.mean([1e6 * one.placing_seconds / one.requests for one in results])),
    }


def _busiest(result: RoutingResult, replicas: int) -> float:
    return max(result.by_replica.values()) * replicas / result.requests


def _times(result: RoutingResult) -> tuple[float, float, float, float]:
    first = result.first_tokens
    return (
        float(np.mean(first)),
        float(np.percentile(first, 95)),
        float(np.mean(result.answers)),
        result.seconds,
    )


def _show(row: dict[str, Any]) -> None:
    print(
        f"{row['costs']:5} {row['chats']:5} {row['router']:24} {row['skipped']:9.2f}% "
        f"{row['points']:+6.2f} ± {row['error']:4.2f} {row['first']:6.3f} {row['p95']:6.3f} "
        f"{row['answer']:6.3f} {row['run']:6.3f} {row['moved']:6.1f} {row['busiest']:7.2f} "
        f"{row['failed']:6.1f} {row['placing']:7.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
