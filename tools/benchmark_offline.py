#!/usr/bin/env python
"""Runs the workloads on the engine in this process; the figures as JSON and in a line each.

    python tools/benchmark_offline.py                                  every workload, small
    python tools/benchmark_offline.py --workload multi_turn --scale 0.1 --json out.json
    python tools/benchmark_offline.py --workload unique --compare prefix-caching --pairs 7

At full size, on a GPU, beside other engines' figures and what the hardware allows:

    python tools/benchmark_offline.py --config configs/nemotron-h-8b.yaml --scale 1 --repeats 3 \\
        --peer docs/peers.json --limits --json out.json
    python tools/benchmark_offline.py --from-json out.json --peer docs/peers.json --plot docs/images
    python tools/benchmark_offline.py --limits-only configs/*.yaml     what it allows alone

What an earlier workload left in the cache, in the way of a later one:

    python tools/benchmark_offline.py --workload unique,shared_system --keep-cache \\
        --shared-prefix 7000 --config configs/nemotron-h-8b.yaml --scale 1

All flags of the engine are taken too; without --load the reference model that ships with the
package is measured. `--compare prefix-caching` measures what prefix caching costs or saves: two
engines on the same weights, one with it and one without, run the same workload in alternating
order; every pair uses other tokens. On a GPU both need room, so the sizes of their caches have to
be given.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import WORKLOAD_NAMES, Workload, make_workload, summarize
from bench.driver import BenchmarkError, Run, run_workload
from bench.environment import describe_environment, peak_memory
from bench.limits import LIMITED, Rates, limits_table, over_limits, shape_of
from bench.peers import Peer, PeersError, load_peers, peers_of, summary_head, summary_row
from bench.plots import plot_workloads
from bench.workloads import IF_NAMED, SHARED_PREFIX
from megatron_hybrid import EngineConfig
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.engine.choices import resolve_device
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import collecting_seldom
from megatron_hybrid.errors import ConfigurationError

DEFAULT_SCALE = 0.02
TERA = 1e12
# Seeds of the warm-up runs: far from those that are measured.
WARM_UP_SEED = 10**6


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--workload",
        default="all",
        metavar="NAME[,NAME...]",
        help=f"which requests to send, in this order: all ({', '.join(WORKLOAD_NAMES)}), or some "
        f"of these and of {', '.join(IF_NAMED)}",
    )
    group.add_argument(
        "--scale",
        type=float,
        help="multiplies every token length; 1 is meant for large GPUs (default: "
        f"{DEFAULT_SCALE}; of --limits-only: 1)",
    )
    group.add_argument(
        "--count-scale",
        type=float,
        help="multiplies the number of requests (default: the same as --scale)",
    )
    group.add_argument(
        "--shared-prefix",
        type=int,
        default=SHARED_PREFIX,
        help=f"tokens of shared_system's prompt at scale 1 (default: {SHARED_PREFIX})",
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
        "--warm-up",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of its requests that each workload is warmed up with; 0: none (default: 1)",
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
        help="don't empty the cache before each run: only before each repeat of the whole list of "
        "workloads, and with --compare never, so that it fills up and evicts",
    )
    group.add_argument(
        "--json", type=Path, metavar="OUT", help="write the JSON here, not to stdout"
    )
    group.add_argument(
        "--from-json", type=Path, metavar="IN", help="show an earlier run's JSON; measure nothing"
    )
    group.add_argument(
        "--peer", type=Path, metavar="FILE", help="other engines' figures, like docs/peers.json"
    )
    group.add_argument(
        "--limits",
        action="store_true",
        help="show the measured times over what the hardware allows, of one GPU: bytes at "
        "--copy-rate for decode_N, products at --product-rate for prompts",
    )
    group.add_argument(
        "--limits-only",
        nargs="+",
        metavar="YAML",
        help="show what the hardware allows for these configurations; measure nothing, which needs "
        "neither a GPU nor weights",
    )
    rates = Rates()
    group.add_argument(
        "--copy-rate",
        type=float,
        default=rates.copy / TERA,
        metavar="TB/s",
        help="bytes that the GPU copies, read and written (default: %(default)s, an H200)",
    )
    group.add_argument(
        "--product-rate",
        type=float,
        default=rates.product / TERA,
        metavar="TFLOP/s",
        help="of large matrix products in the model's type (default: %(default)s, an H200)",
    )
    group.add_argument("--plot", type=Path, metavar="DIR", help="draw DIR/workloads_MODEL.png")
    add_engine_arguments(parser)
    args = parser.parse_args()
    for name in ("repeats", "pairs", "shared_prefix"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1.")
    for name in ("copy_rate", "product_rate"):
        if not getattr(args, name) > 0:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} is {getattr(args, name)}; give more than 0.")
    if args.scale is None:
        args.scale = 1.0 if args.limits_only else DEFAULT_SCALE
    if args.scale <= 0 or (args.count_scale is not None and args.count_scale <= 0):
        parser.error("--scale and --count-scale must be more than 0.")
    if not 0 <= args.warm_up <= 1:
        parser.error(f"--warm-up is {args.warm_up}; give a share from 0 to 1.")
    if args.count_scale is None:
        args.count_scale = args.scale
    args.names = list(WORKLOAD_NAMES) if args.workload == "all" else args.workload.split(",")
    known = WORKLOAD_NAMES + IF_NAMED
    for name in args.names:
        if name not in known:
            parser.error(f"--workload {name!r} is not one of {', '.join(known)}.")
    if args.limits and args.compare:
        parser.error("--limits is of times, and --compare measures ratios; leave one of them out.")
    if args.limits_only and not set(args.names) & set(LIMITED):
        parser.error(f"--limits-only takes a --workload of {', '.join(LIMITED)}.")
    return args


class Bench:
    """One engine and the workloads made for its vocabulary."""

    def __init__(self, args: argparse.Namespace, engine: DynamicInferenceEngine) -> None:
        self._args = args
        self.engine = engine

    def workload(self, name: str, seed: int, count_share: float = 1.0) -> Workload:
        workload = make_workload(
            name,
            self.engine.vocab_size,
            seed=seed,
            scale=self._args.scale,
            count_scale=self._args.count_scale * count_share,
            shared_prefix=self._args.shared_prefix,
        )
        longest, limit = workload.token_counts().longest, self.engine.max_seq_length
        if longest > limit:
            raise BenchmarkError(
                f"{name} at --scale {self._args.scale} needs {longest} tokens a sequence, more"
                f" than the {limit} of --inference-max-seq-length; lower --scale."
            )
        return workload

    def run(self, workload: Workload, label: str, *, keep_cache: bool = False) -> Run:
        if not keep_cache:
            self.engine.reset_prefix_cache()
        # Collected now, so that no run pays for what an earlier one left behind.
        gc.collect()
        total = workload.token_counts().requests
        # disable=None: no bar in a log
        bar = tqdm(total=total, desc=label, unit="req", leave=False, disable=None)
        with bar, collecting_seldom():  # as LLM.generate and servers do
            return run_workload(self.engine, workload, on_finish=bar.update)

    def warm_up(self, name: str) -> None:
        if self._args.warm_up > 0:
            self.run(self.workload(name, WARM_UP_SEED, self._args.warm_up), f"warm-up {name}")


class Report:
    """What is written: after every workload, so that a run that is cut short leaves its figures."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self._path: Path | None = args.json
        self.values: dict[str, Any] = {
            "model": _model_name(config),
            "scale": args.scale,
            "count_scale": args.count_scale,
            "shared_prefix": args.shared_prefix,
            "cache_kept_between_runs": args.keep_cache,
            "results": [],
            **describe_environment(),
            "engine": dataclasses.asdict(config),
        }

    def add(self, result: dict[str, Any]) -> None:
        self.values["results"].append(result)
        print(describe(result), file=sys.stderr)
        if self._path is not None:
            self._path.write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        return json.dumps(self.values, indent=2)


def measure(bench: Bench, args: argparse.Namespace, report: Report) -> None:
    if args.keep_cache:  # the workloads are one sequence, and that is what is repeated
        for name in args.names:
            bench.warm_up(name)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.names}
        for repeat in range(args.repeats):
            bench.engine.reset_prefix_cache()
            for name in args.names:
                runs[name].append(measure_once(bench, name, repeat, args))
        for name in runs:
            report.add(median_run(runs[name]))
        return
    for name in args.names:
        bench.warm_up(name)
        repeats = range(args.repeats)
        report.add(median_run([measure_once(bench, name, repeat, args) for repeat in repeats]))


def measure_once(bench: Bench, name: str, repeat: int, args: argparse.Namespace) -> dict[str, Any]:
    seed = args.workload_seed + repeat
    workload = bench.workload(name, seed)
    label = f"{name} {repeat + 1}/{args.repeats}"
    run = bench.run(workload, label, keep_cache=args.keep_cache)
    figures = summarize(run.records, run.round_walls)
    return {"workload": name, "seed": seed, "digest": workload.digest(), **figures}


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By wall time; for an even number the faster of the two in the middle."""
    runs = sorted(runs, key=lambda figures: figures["wall_s"])
    walls = [figures["wall_s"] for figures in runs]
    return {**runs[(len(runs) - 1) // 2], "walls_s": walls, "peak_memory": peak_memory()}


def build_pair(args: argparse.Namespace, config: EngineConfig) -> dict[str, Bench]:
    """Two engines on the same weights, without and with prefix caching."""
    given = config.inference_dynamic_batching_buffer_size_gb
    if resolve_device(config).type == "cuda" and given is None:
        raise ConfigurationError(
            "--compare builds two engines on one GPU: give "
            "--inference-dynamic-batching-buffer-size-gb, which both take, and "
            "--inference-dynamic-batching-prefix-caching-mamba-gb, which one of them takes."
        )
    model = load_weights(config)
    benches = {}
    for label, on in (("off", False), ("on", True)):
        own = dataclasses.replace(config, inference_dynamic_batching_prefix_caching=on)
        benches[label] = Bench(args, build_engine(own, model=model))
    return benches


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


def describe(result: dict[str, Any], peers: Sequence[Peer] = (), model: str = "") -> str:
    if "wall_ratio_on_over_off" in result:
        wall, cpu = result["wall_ratio_on_over_off"], result["cpu_ratio_on_over_off"]
        return (
            f"{result['workload']:13} time with caching over without, {result['pairs']} pairs:"
            f" wall median {wall['median']:.4f} ({wall['min']:.4f} to {wall['max']:.4f}),"
            f" CPU median {cpu['median']:.4f} ({cpu['min']:.4f} to {cpu['max']:.4f})"
        )
    return summary_row(result, peers, model)


def show(report: dict[str, Any], peers: Sequence[Peer], args: argparse.Namespace) -> None:
    """The summary, a line a workload, and what else is asked for: time over limits, the plot."""
    as_measured = report["scale"] == report["count_scale"] == 1
    if report["shared_prefix"] != SHARED_PREFIX or report["cache_kept_between_runs"]:
        as_measured = False
    if peers and not as_measured:
        print("Peers are left out: they ran other workloads (see --scale).", file=sys.stderr)
        peers = []
    model, results = report["model"], report["results"]
    peers = peers_of(peers, model)
    title = f"{model} on {report['machine']['device']}"
    print(title, file=sys.stderr)
    runs = [result for result in results if "walls_s" in result]
    if runs:
        print(summary_head(peers), file=sys.stderr)
    for result in results:
        print(describe(result, peers, model), file=sys.stderr)
    if args.limits:
        engine: dict[str, Any] = {  # JSON has no tuples
            name: tuple(value) if isinstance(value, list) else value
            for name, value in report["engine"].items()
        }
        config = EngineConfig(**engine)
        if config.dtype is None and report["machine"]["device"] == "cpu":  # the engine's choice
            config = dataclasses.replace(config, dtype="float32")
        sizes = report["scale"], report["count_scale"]
        pairs = [
            (run, _of_any_tokens(run["workload"], *sizes))
            for run in runs
            if run["workload"] in LIMITED
        ]
        print(over_limits(pairs, shape_of(config), _rates(args)), file=sys.stderr)
    if args.plot is not None and runs:
        plot_workloads(runs, model, peers, args.plot / f"workloads_{model}.png", title)


def show_limits(args: argparse.Namespace) -> None:
    """What the hardware allows for the configurations of --limits-only."""
    shapes = {}
    for path in args.limits_only:
        config = engine_config_from_args(argparse.Namespace(**vars(args) | {"config": path}))
        shapes[Path(path).stem] = shape_of(config)
    names = [name for name in LIMITED if name in args.names]
    workloads = [_of_any_tokens(name, args.scale, args.count_scale) for name in names]
    print(limits_table(shapes, workloads, _rates(args)))


def _rates(args: argparse.Namespace) -> Rates:
    return Rates(args.copy_rate * TERA, args.product_rate * TERA)


def _of_any_tokens(name: str, scale: float, count_scale: float) -> Workload:
    """A workload of which only lengths and counts matter."""
    return make_workload(name, vocab_size=2, scale=scale, count_scale=count_scale)


def _model_name(config: EngineConfig) -> str:
    return "reference_model" if config.load is None else Path(config.load).resolve().name


def main() -> int:
    args = parse_arguments()
    try:
        if args.limits_only:
            show_limits(args)
            return 0
        peers = load_peers(args.peer) if args.peer else []
        if args.from_json:
            show(json.loads(args.from_json.read_text(encoding="utf-8")), peers, args)
            return 0
        config = engine_config_from_args(args)
        if args.limits and math.prod(config.parallel_sizes.numbers) > 1:
            raise ConfigurationError("--limits is of one GPU; leave it out for a model on several.")
        report = Report(args, config)
        if args.compare:
            benches = build_pair(args, config)
            for name in args.names:
                report.add(compare(benches, name, args))
        else:
            measure(Bench(args, build_engine(config)), args, report)
    except (ConfigurationError, BenchmarkError, PeersError) as error:
        print(f"benchmark_offline.py: {error}", file=sys.stderr)
        return 2
    if args.json is None:
        print(report.text())
    show(report.values, peers, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
