#!/usr/bin/env python
"""Runs the workloads on the engine in this process and prints the figures as JSON.

    python tools/benchmark_offline.py                                  every workload, small
    python tools/benchmark_offline.py --workload multi_turn --scale 0.1 --json out.json
    python tools/benchmark_offline.py --workload unique --compare prefix-caching --pairs 7

All flags of the engine are taken too; without --load the reference model that ships with the
package is measured. `--compare prefix-caching` measures what prefix caching costs or saves: two
engines are built once, one with it and one without, and run the same workload in alternating
order; every pair uses other tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_hybrid import LLM, EngineConfig
from megatron_hybrid.arguments import add_engine_arguments, engine_config_from_args
from megatron_hybrid.benchmarks import WORKLOAD_NAMES, Workload, make_workload, summarize
from megatron_hybrid.benchmarks.driver import BenchmarkError, Run, run_workload
from megatron_hybrid.benchmarks.environment import describe_environment, peak_memory
from megatron_hybrid.errors import ConfigurationError

# Seeds of the warm-up runs: far from those that are measured.
WARM_UP_SEED = 10**6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--workload",
        default="all",
        choices=["all", *WORKLOAD_NAMES],
        help="which requests to send (default: all of them, one after another)",
    )
    group.add_argument(
        "--scale",
        type=float,
        default=0.02,
        help="multiplies every token length; 1 is meant for large GPUs (default: 0.02)",
    )
    group.add_argument(
        "--count-scale",
        type=float,
        help="multiplies the number of requests (default: the same as --scale)",
    )
    group.add_argument(
        "--workload-seed", type=int, default=0, help="first seed of the workload's tokens"
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of each workload, each with another seed; the median by wall time is reported",
    )
    group.add_argument(
        "--compare",
        choices=["prefix-caching"],
        help="measure the ratio of wall times with and without it, in interleaved pairs",
    )
    group.add_argument(
        "--pairs", type=int, default=7, help="pairs of runs for --compare (default: 7)"
    )
    group.add_argument(
        "--keep-cache",
        action="store_true",
        help="with --compare: don't empty the cache between runs, so that it fills up and evicts",
    )
    group.add_argument("--json", type=Path, metavar="OUT", help="write the JSON to this file too")
    add_engine_arguments(parser)
    args = parser.parse_args()
    for name in ("repeats", "pairs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; give at least 1.")
    if args.scale <= 0 or (args.count_scale is not None and args.count_scale <= 0):
        parser.error("--scale and --count-scale must be more than 0.")
    if args.keep_cache and not args.compare:
        parser.error("--keep-cache only means something together with --compare.")
    return args


class Bench:
    """One engine and the workloads made for its vocabulary."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self._args = args
        self.llm = LLM(config=config)

    def workload(self, name: str, seed: int) -> Workload:
        workload = make_workload(
            name,
            self.llm.engine.vocab_size,
            seed=seed,
            scale=self._args.scale,
            count_scale=self._args.count_scale,
        )
        longest, limit = workload.token_counts().longest, self.llm.engine.max_seq_length
        if longest > limit:
            raise BenchmarkError(
                f"{name} at --scale {self._args.scale} needs {longest} tokens a sequence, more"
                f" than the {limit} of --inference-max-seq-length; lower --scale."
            )
        return workload

    def run(self, workload: Workload, label: str, *, keep_cache: bool = False) -> Run:
        if not keep_cache:
            self.llm.engine.reset_prefix_cache()
        # Collected now, so that no run pays for what an earlier one left behind.
        gc.collect()
        total = workload.token_counts().requests
        with tqdm(total=total, desc=label, unit="req", leave=False, file=sys.stderr) as bar:
            return run_workload(self.llm.engine, workload, on_finish=bar.update)

    def warm_up(self, name: str) -> None:
        self.run(self.workload(name, WARM_UP_SEED), "warm-up")


def measure(bench: Bench, name: str, args: argparse.Namespace) -> dict[str, Any]:
    bench.warm_up(name)
    runs: list[tuple[float, dict[str, Any]]] = []
    for repeat in range(args.repeats):
        seed = args.workload_seed + repeat
        workload = bench.workload(name, seed)
        run = bench.run(workload, f"{name} {repeat + 1}/{args.repeats}")
        figures = {
            "workload": name,
            "seed": seed,
            "digest": workload.digest(),
            **summarize(run.records, run.round_walls),
        }
        runs.append((run.wall, figures))
    runs.sort(key=lambda pair: pair[0])
    # For an even number the faster of the two in the middle.
    figures = runs[(len(runs) - 1) // 2][1]
    return {**figures, "walls_s": [wall for wall, _ in runs], "peak_memory": peak_memory()}


def compare(benches: dict[str, Bench], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Ratio of times, caching on over caching off, over interleaved pairs.

    Next to the wall time stands the CPU time of this process, which other processes on the machine
    disturb less (with OMP_NUM_THREADS=1: threads that wait for each other count as busy).
    """
    for bench in benches.values():
        bench.warm_up(name)
    walls: dict[str, list[float]] = {label: [] for label in benches}
    cpu: dict[str, list[float]] = {label: [] for label in benches}
    cached = 0
    for pair in range(args.pairs):
        seed = args.workload_seed + pair
        # ABBA: whatever drifts on the machine hits both alike.
        order = list(benches) if pair % 2 == 0 else list(reversed(benches))
        for label in order:
            bench = benches[label]
            run = bench.run(
                bench.workload(name, seed),
                f"{name} pair {pair + 1}/{args.pairs}, caching {label}",
                keep_cache=args.keep_cache,
            )
            walls[label].append(run.wall)
            cpu[label].append(run.cpu_seconds)
            if label == "on":
                cached += sum(record.cached_tokens for record in run.records)
    return {
        "workload": name,
        "pairs": args.pairs,
        "wall_ratio_on_over_off": _ratio(walls),
        "cpu_ratio_on_over_off": _ratio(cpu),
        "wall_s": walls,
        "cpu_s": cpu,
        "cached_tokens": cached,
        "cache_kept_between_runs": args.keep_cache,
        "peak_memory": peak_memory(),
    }


def _ratio(seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "all": ratios,
    }


def describe(result: dict[str, Any]) -> str:
    if "wall_ratio_on_over_off" in result:
        wall, cpu = result["wall_ratio_on_over_off"], result["cpu_ratio_on_over_off"]
        return (
            f"{result['workload']:14} time with caching over without, {result['pairs']} pairs:"
            f" wall median {wall['median']:.4f} ({wall['min']:.4f} to {wall['max']:.4f}),"
            f" CPU median {cpu['median']:.4f} ({cpu['min']:.4f} to {cpu['max']:.4f})"
        )
    return (
        f"{result['workload']:14} {result['wall_s']:8.3f} s {result['output_tok_s']:8.1f} tok/s"
        f"   cached {result['cached_tokens']} of {result['prompt_tokens']} prompt tokens"
        f"   TTFT {1e3 * result['ttft_s']['mean']:.1f} ms"
    )


def main() -> int:
    args = parse_arguments()
    names = WORKLOAD_NAMES if args.workload == "all" else (args.workload,)
    try:
        config = engine_config_from_args(args)
        results = []
        if args.compare:
            benches = {
                label: Bench(
                    args,
                    dataclasses.replace(config, inference_dynamic_batching_prefix_caching=on),
                )
                for label, on in (("off", False), ("on", True))
            }
            for name in names:
                results.append(compare(benches, name, args))
                print(describe(results[-1]), file=sys.stderr)
        else:
            bench = Bench(args, config)
            for name in names:
                results.append(measure(bench, name, args))
                print(describe(results[-1]), file=sys.stderr)
    except (ConfigurationError, BenchmarkError) as error:
        print(f"benchmark_offline.py: {error}", file=sys.stderr)
        return 2
    report = {
        "scale": args.scale,
        "count_scale": args.scale if args.count_scale is None else args.count_scale,
        "results": results,
        **describe_environment(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
