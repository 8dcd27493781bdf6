#!/usr/bin/env python
"""The GPU's tests and figures, job after job, within a limit of time.

    python tools/measure_gpu.py --list
    python tools/measure_gpu.py --out runs/gpu --only tests/ --beside 4
    python tools/measure_gpu.py --out runs/gpu --only "rows/|prompts/" --seconds 560
    python tools/measure_gpu.py --out runs/gpu --summary

A job is a command, with what it prints in OUT/NAME.log and its figures, if it has any, in
OUT/NAME.json. One that has ended well is not run again, so that a call goes on where one before it
was out of time. Tests run --beside each other, but for a few that need a GPU for themselves; these
and figures run alone. A line is printed for each job, and for one that failed the end of its log.
The figures' commands are those of docs/performance.md, docs/tiers.md and docs/rl.md, with random
weights; those of `apart` are for two GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_hybrid.arguments import ArgumentParser

ROOT = Path(__file__).parents[1]
STATES = "--inference-dynamic-batching-prefix-caching-mamba-gb"
KV = "--inference-dynamic-batching-buffer-size-gb"
DECODES = ("decode_1", "decode_32", "decode_256")
ROWS = (*DECODES, "unique")
OTHERS = "multi_turn,fork,shared_system,long_resume"
FAMILIES = """nemotron_h granite_moe_hybrid qwen3_5 qwen3_5_moe lfm2 falcon_mamba mamba jamba
    nemotron_h_moe mamba2 bamba falcon_h1 lfm2_moe qwen3_next zamba2 llama qwen3 kimi_linear
    bailing_hybrid lfm3 olmo_hybrid minimax bailing_moe_linear bailing_moe_v2_5 zamba
    recurrent_gemma xlstm rwkv inkling inkling2 zaya glm5_next qwen4_exp""".split()
# Shapes of the table, and GB for their cached states.
SHAPES = {
    "nemotron-h-8b": 56,
    "granite-4.0-h-tiny": 56,
    "qwen3.5-35b-a3b": 32,
    "lfm2-1.2b": 4,
    "falcon-mamba-7b": 56,
    "nemotron-3-nano-30b-a3b": 32,
}
QUANTISED = {"nemotron-h-8b": ("--quantization", "fp8"), "qwen3.5-35b-a3b-nvfp4": ()}
DRAFTED = {"nemotron-h-8b": (40, 6), "granite-4.0-h-tiny": (24, 6)}  # GB of KV and of states
FEW = "conv decode,conv tiles,product of few rows,product of one row"
EXPERTS = "norm and router,router,experts,expert tiles"
KERNELS = {
    "nemotron-h-8b": f"{FEW},spared writes",
    "granite-4.0-h-tiny": f"{FEW},spared writes,{EXPERTS},attention decode",
    "qwen3.5-35b-a3b": f"{FEW},spared writes,{EXPERTS},attention decode",
    "falcon-mamba-7b": "Mamba1 decode,conv decode,conv tiles,product of few rows",
    "jamba-mini-1.6": "Mamba1 decode",
    "lfm2-1.2b": "conv,layer prefill,product of few rows,attention decode",
}
MOST_SECONDS = 420  # of a job
# Tests that look at how much memory is free, or that have kernels which wait for another GPU's.
ALONE = ("parallel", "sizing", "sleep")
NO_TESTS = 5  # pytest's exit code where all modules are skipped


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]  # OUT.json stands for where its figures go, OUT.files for a folder
    alone: bool = True


def jobs() -> Iterator[Job]:
    """All, in the order in which they run."""
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*_gpu.py")):
        name = file.stem.removeprefix("test_").removesuffix("_gpu")
        pytest = ("-m", "pytest", "-q", "--maxfail", "6", "-p", "no:cacheprovider", str(file))
        if name != "engine":
            yield Job(f"tests/{name}", pytest, alone=name in ALONE)
            continue
        for family in FAMILIES:
            own = (*pytest, "-k", f"[{family}- or [{family}]")
            yield Job(f"tests/engine-{family}", own, alone=False)
        mixed = (*pytest, "-k", "mixed_graphs")
        yield Job("tests/engine-mixed-graphs", mixed, alone=False)
    for model, only in KERNELS.items():
        cases = ("--model", model, "--only", only, "--json", "OUT.json")
        yield Job(f"kernels/{model}", ("tools/benchmark_kernels.py", *cases))
    for model, states in SHAPES.items():
        yield _offline(f"rows/{model}", model, ",".join(ROWS), states)
    for model, more in QUANTISED.items():
        yield _offline(f"quantised/{model}", model, ",".join(ROWS), 32, *more)
    long = ("--count-scale", "0.125")
    prompts = "prompts_8k,prompts_20k,prompts_40k,prompt_65k"
    yield _offline("prompts/qwen3.5-35b-a3b", "qwen3.5-35b-a3b", prompts, 32, *long)
    first = ",".join(f"first_token_{length}" for length in ("600", "1k", "2k", "4k"))
    for model, states in SHAPES.items():
        yield _offline(f"first/{model}", model, first, min(states, 16))
    for model in ("nemotron-h-8b", "granite-4.0-h-tiny", "qwen3.5-35b-a3b"):
        yield _offline(f"others/{model}", model, OTHERS, SHAPES[model])
    for model in ("nemotron-h-8b", "qwen3.5-35b-a3b"):
        starts = ("--config", f"configs/{model}.yaml", "--runs", "3")
        yield Job(f"starts/{model}", ("tools/benchmark_start.py", *starts))
    for model, (kv, states) in DRAFTED.items():
        rooms = ("--num-speculative-tokens", "4", KV, str(kv), STATES, str(states))
        # five engines capture them
        few = ("--inference-dynamic-batching-num-cuda-graphs", "6")
        none = ("--inference-dynamic-batching-cuda-graph-mixed-prefill-count", "0")
        loads = ("decode_1", "decode_8", "decode_32", "decode_128", "decode_256")
        short = ("--config", f"configs/{model}.yaml", "--prompt", "256")
        options = (*short, *rooms, *few, *none, *loads)
        yield Job(f"drafts/{model}", ("tools/benchmark_drafts.py", *options))
    shape = ("--config", "configs/nemotron-h-8b.yaml", "--json", "OUT.json")
    yield Job("sleep/nemotron-h-8b", ("tools/measure_sleep.py", *shape))
    yield from _tiers("nemotron-h-8b")
    for model in SHAPES:
        steps = ("--config", f"configs/{model}.yaml", *DECODES, "prefill", "--rows", "14")
        yield Job(f"profile/{model}", ("tools/profile_steps.py", *steps))


def _offline(name: str, model: str, workloads: str, states: int, *more: str) -> Job:
    scale = ("--scale", "1", "--repeats", "3", "--warm-up", "0.25", STATES, str(states))
    command = ("tools/benchmark_offline.py", "--config", f"configs/{model}.yaml", *scale)
    figures = ("--limits", "--workload", workloads, *more, "--json", "OUT.json")
    return Job(name, (*command, *figures))


def _tiers(model: str) -> Iterator[Job]:
    """docs/tiers.md's."""
    shape = ("--config", f"configs/{model}.yaml", "--scale", "1", "--json", "OUT.json")
    graphs = "--inference-dynamic-batching-num-cuda-graphs"
    requests, host = "--inference-dynamic-batching-max-requests", "--prefix-caching-host-gb"
    small = (host, "64", KV, "8", STATES, "4", requests, "40", graphs, "4")
    disk = ("--prefix-caching-disk", "OUT.files", "--prefix-caching-disk-gb", "10")
    large = (host, "24", KV, "20", STATES, "16", requests, "80", graphs, "8")
    loads = ("tools/benchmark_tiers.py", *shape, *small, "--load-names")
    yield Job(f"tiers/{model}", (*loads, "resume,replay,decodes"))
    yield Job(f"tiers/{model}-restart", (*loads, "restart", *disk))
    yield Job(f"tiers/{model}-chats", (*loads, "chats"))
    yield Job(f"apart/{model}", ("tools/benchmark_disaggregation.py", *shape, *large))


class Runs:
    """Jobs' files in a folder, and how long there is for them."""

    def __init__(self, out: Path, seconds: float, engine_flags: Sequence[str]) -> None:
        self._out, self._flags = out, tuple(engine_flags)
        self._end = time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job) -> bool:
        """Whether it is done, now or before; says how it went."""
        # Not with_suffix, which takes the end of "qwen3.5-35b-a3b" for one.
        file = str(self._out / job.name.replace("/", "-"))
        done, log = Path(f"{file}.done"), Path(f"{file}.log")
        if done.exists():
            return True
        left = min(self._end - time.monotonic(), MOST_SECONDS)
        if left <= 0:
            print(f"{job.name}: no time is left", flush=True)
            return False
        command = [re.sub("^OUT(?=[.])", file, part) for part in job.command]
        if "--config" in command:
            command += self._flags
        begin = time.monotonic()
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    [sys.executable, *command],
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=left,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        if code == NO_TESTS and "pytest" in command and "-k" not in command:  # lacks a library
            code = 0
        how = {0: "done", None: "out of time"}.get(code, f"failed ({code})")
        lines = log.read_text(errors="replace").splitlines()
        print(f"{job.name}: {how}, {time.monotonic() - begin:.0f} s: {(lines or [''])[-1][:160]}")
        if code == 0:
            done.touch()
        else:
            print("\n".join(f"    {line[:200]}" for line in lines[-12:]))
        sys.stdout.flush()
        return code == 0


def summary(out: Path) -> str:
    """Of the figures in a folder: a row a shape, as in the tables of docs/performance.md."""
    head = ["shape", *(f"{name}, ms" for name in DECODES), "unique, s", "prompt tokens a second"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for path in sorted(out.glob("*.json")):
        report = json.loads(path.read_text())
        results = {one["workload"]: one for one in report["results"]} if "engine" in report else {}
        if not results:
            continue
        means = (
            results[name]["steady_itl_ms"]["mean"] if name in results else None for name in DECODES
        )
        cells = ["" if mean is None else f"{mean:.2f}" for mean in means]
        cells.append(f"{results['unique']['wall_s']:.2f}" if "unique" in results else "")
        long = (name for name in results if name.startswith("prompt"))
        cells.append(", ".join(f"{name} {results[name]['prompt_tok_s']:.0f}" for name in long))
        rows.append(f"| {path.stem} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="a folder")
    parser.add_argument("--only", default="", metavar="REGEX", help="jobs that it is found in")
    parser.add_argument("--seconds", type=float, default=3600, help="for all (default: 3600)")
    parser.add_argument(
        "--beside",
        type=int,
        default=4,
        help="tests at a time (default: 4); with more than 6 or so engines a GPU's 80 GB run out",
    )
    parser.add_argument("--list", action="store_true", help="show the jobs' commands")
    parser.add_argument("--summary", action="store_true", help="show the figures that are there")
    parser.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAG", help="for all that run an engine, after --"
    )
    args = parser.parse_args()
    wanted = [job for job in jobs() if re.search(args.only, job.name)]
    if not wanted:
        parser.error(f"--only {args.only} is found in no job's name; --list shows them.")
    if args.list:
        for job in wanted:
            print(f"{job.name}: python {' '.join(job.command)}")
        return 0
    if args.summary:
        print(summary(args.out))
        return 0
    runs = Runs(args.out, args.seconds, args.engine_flags)
    with ThreadPoolExecutor(max(1, args.beside)) as pool:
        done = list(pool.map(runs.run, [job for job in wanted if not job.alone]))
    done += [runs.run(job) for job in wanted if job.alone]
    print(summary(args.out))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
