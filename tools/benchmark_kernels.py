#!/usr/bin/env python
"""Times every kernel at the sizes of a model, beside its floor and beside libraries' kernels.

    python tools/benchmark_kernels.py --json out.json
    python tools/benchmark_kernels.py --model granite-4.0-h-tiny --only experts,scan

The floor is the time that the device needs to move the kernel's inputs and outputs once, at the
bandwidth of a copy, or to do its multiplications, at the speed of a matrix product, whichever is
longer; copy and product are measured in the same run. Calls rotate among inputs larger than the L2
cache and are captured in CUDA graphs; a figure with * was launched instead, because the kernel
can't be captured. On a CPU the kernels in plain torch run at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from bench.cases import Bench, Case
from bench.environment import describe_environment
from bench.kernel_cases import kernel_cases
from bench.timing import Ceilings, Timing, number_of_sets, time_calls
from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.folder import ModelFolder

CONFIGS = Path(__file__).parents[1] / "configs" / "models"


def run(case: Case, bench: Bench, ceilings: Ceilings) -> dict[str, Any]:
    """Every call of a case timed; a library's that fails is left out, with the reason."""
    sets = [case.make() for _ in range(2 if bench.tiny else number_of_sets(case.num_bytes))]
    floor = ceilings.floor(case.num_bytes, case.flops)
    row: dict[str, Any] = {
        "name": case.name,
        "shape": case.shape,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "floor_us": 1e6 * floor,
        "libraries_us": {},
    }
    timings: dict[str, list[Timing]] = {label: [] for label in sets[0]}
    for label in [*sets[0]] * case.rounds:
        try:
            timings[label].append(time_calls([calls[label] for calls in sets], bench.device))
        except Exception as error:  # one kernel must not cost the figures of the others
            why = " ".join(str(error).split())  # in one line, or the table would break
            row.setdefault("failed", {})[label] = f"{type(error).__name__}: {why}"[:300]
    for label, found in timings.items():
        if not found:
            continue
        timing = sorted(found)[len(found) // 2]
        if label == "ours":
            row["us"], row["captured"] = 1e6 * timing.seconds, timing.captured
            row["over_floor"] = timing.seconds / floor
        else:
            row["libraries_us"][label] = 1e6 * timing.seconds
    return row


# Padded, so that a terminal shows it as a table and a Markdown page takes it as it is.
HEAD = (
    f"| {'kernel':18} | {'size':34} | {'us':>10} | {'floor us':>8} | {'ratio':>7} "
    "| libraries, us |\n"
    "|---|---|---|---|---|---|"
)


def describe(row: dict[str, Any], on_gpu: bool) -> str:
    mark = "*" if on_gpu and not row.get("captured", True) else " "
    others = [f"{label} {us:.1f}" for label, us in row["libraries_us"].items()]
    others += [f"{label} failed: {why}" for label, why in row.get("failed", {}).items()]
    return (
        f"| {row['name']:18} | {row['shape']:34} | {row.get('us', math.nan):9.1f}{mark} "
        f"| {row['floor_us']:8.1f} | {row.get('over_floor', math.nan):7.2f} | {', '.join(others)} |"
    )


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="nemotron-h-8b",
        help="a folder of configs/models, or a Hugging Face folder (default: nemotron-h-8b)",
    )
    parser.add_argument(
        "--only", default="", metavar="NAME[,NAME...]", help="rows whose name begins like one"
    )
    parser.add_argument("--kernels", default="auto", choices=["auto", "reference"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here too")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    folder = CONFIGS / args.model if (CONFIGS / args.model).is_dir() else Path(args.model)
    try:
        bench = Bench(ModelFolder.open(folder).config, device, args.kernels)
    except ConfigurationError as error:
        print(f"benchmark_kernels.py: {error}", file=sys.stderr)
        return 2
    wanted = tuple(args.only.split(","))
    rows = []
    with torch.inference_mode():
        ceilings = Ceilings.measure(device)
        print(
            f"{args.model} on {torch.cuda.get_device_name() if on_gpu else 'cpu'}, kernels "
            f"{bench.kernels.name}: copy {ceilings.bytes_per_second / 1e12:.3f} TB/s, matrix "
            f"product {ceilings.flops / 1e12:.1f} TFLOP/s\n{HEAD}"
        )
        for case in kernel_cases(bench):
            if case.name.startswith(wanted):
                rows.append(run(case, bench, ceilings))
                print(describe(rows[-1], on_gpu), flush=True)
                if on_gpu:
                    torch.cuda.empty_cache()
    if not rows:
        print(f"benchmark_kernels.py: --only {args.only} names no row.", file=sys.stderr)
        return 2
    report = {
        "model": args.model,
        "kernels": bench.kernels.name,
        "copy_bytes_per_s": ceilings.bytes_per_second,
        "matmul_flops": ceilings.flops,
        "rows": rows,
        **describe_environment(),
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
