#!/usr/bin/env python
"""Simulates the prefix cache at scale: which policy skips how much of the prompts, at what size.

The real scheduler and cache run through generated traces of any length; no model, no GPU. Decode
is fast-forwarded, so a million requests take minutes.

    python tools/simulate_prefix_cache.py
    python tools/simulate_prefix_cache.py --trace mixed --requests 100000 --seeds 11 12 --workers 2
    python tools/simulate_prefix_cache.py --ablation --pool-sizes 10 --json ablation.json
    python tools/simulate_prefix_cache.py --requests 20000 --plot plots
    python tools/simulate_prefix_cache.py --trace mixed --requests 4000 --policies ours \
        --pool-sizes 1 --host-memory 0 1 4 16
    python tools/simulate_prefix_cache.py --trace mixed --requests 1000000 --policies ours \
        --pool-gib 200 --splits 85

A pool is all bytes of KV blocks, cached states and live states, the same for every policy. Its
size is a percentage of the working set: what our policy holds at a trace's end when memory is
unlimited. (Or so many GiB: --pool-gib spares measuring that.) How a pool is split between KV and
states is a candidate (--splits: percent for states), and each policy is reported at the one at
which it skips most. The oracle is a bound: unlimited memory, reuse at any token.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from megatron_hybrid.arguments import ArgumentParser
from simulation import plots, report
from simulation.policies import ABLATIONS, BASELINES, POLICIES
from simulation.pools import SHAPES, SPLITS
from simulation.sweep import (
    Cell,
    Outcome,
    Pool,
    Reference,
    Workload,
    best_splits,
    cells,
    run_all,
)
from simulation.traces import TRACES


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", nargs="+", default=["all"], choices=[*TRACES, "all"])
    parser.add_argument("--requests", type=int, default=20_000, help="in each trace")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the traces")
    parser.add_argument(
        "--policies", nargs="+", choices=[*POLICIES], help=f"default: {' '.join(BASELINES)}"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="our policy with its features taken away"
    )
    parser.add_argument(
        "--pool-sizes",
        type=float,
        nargs="+",
        default=[1, 2, 5, 10, 20, 50, 100],
        metavar="PERCENT",
        help="of the working set",
    )
    parser.add_argument(
        "--pool-gib", type=float, nargs="+", metavar="GIB", help="sizes in place of --pool-sizes"
    )
    parser.add_argument(
        "--splits",
        type=float,
        nargs="+",
        default=[100 * split for split in SPLITS],
        metavar="PERCENT",
        help="of the pool for cached states",
    )
    parser.add_argument(
        "--host-memory",
        type=float,
        nargs="+",
        default=[0],
        metavar="TIMES",
        help="behind the pool, for what it forgets: so many times its size (0: none)",
    )
    parser.add_argument("--shape", default="nemotron-h-8b", choices=[*SHAPES])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results to this file")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots to this folder")
    args = parser.parse_args()
    if args.requests < 1 or args.workers < 1:
        parser.error("--requests and --workers must be at least 1.")
    if min(args.pool_gib or args.pool_sizes) <= 0:
        parser.error("--pool-sizes and --pool-gib must be more than 0.")
    if not all(0 < split < 100 for split in args.splits):
        parser.error("--splits must be between 0 and 100, both excluded.")
    if min(args.host_memory) < 0:
        parser.error("--host-memory must be at least 0.")
    if args.policies is None:
        args.policies = list(ABLATIONS if args.ablation else BASELINES)
    return args


def _pools(args: argparse.Namespace, reference: Reference) -> list[Pool]:
    if args.pool_gib is not None:
        return [Pool(int(gib * 2**30), f"{gib:g} GiB") for gib in args.pool_gib]
    return [
        Pool(int(percent / 100 * reference.working_set), f"{percent:g}%")
        for percent in args.pool_sizes
    ]


def main() -> int:
    args = parse_arguments()
    if args.plot is not None:
        try:
            plots.load_matplotlib()
        except ImportError as error:
            print(error, file=sys.stderr)
            return 1
        args.plot.mkdir(parents=True, exist_ok=True)

    traces = TRACES if "all" in args.trace else args.trace
    workloads: list[Workload | Cell] = [
        Workload(t, args.requests, s, args.shape, measure_bounds=args.pool_gib is None)
        for t in traces
        for s in args.seeds
    ]
    references: list[Reference] = []
    outcomes: list[Outcome] = []
    with tqdm(total=len(workloads), desc="references", unit="trace") as bar:
        for reference in run_all(workloads, args.workers):
            assert isinstance(reference, Reference)
            references.append(reference)
            bar.update()
    print(report.traces_table(references), "\n")

    splits = [split / 100 for split in args.splits]
    work: list[Workload | Cell] = [
        cell
        for r in references
        for cell in cells(r, args.policies, _pools(args, r), splits, args.host_memory)
    ]
    with tqdm(total=len(work), desc="policies", unit="run") as bar:
        for outcome in run_all(work, args.workers):
            assert isinstance(outcome, Outcome)
            outcomes.append(outcome)
            bar.update()
    best = best_splits(outcomes)
    for reference in references:
        print(report.skipped_table(reference, best), "\n")
    print(report.timing_table(best))

    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(references, outcomes), indent=1) + "\n")
    if args.plot is not None:
        plots.plot_skipped(references, best, args.plot / "skipped_tokens.png")
        plots.plot_decision_time(best, args.plot / "decision_time.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
