#!/usr/bin/env python
"""What a start takes, each time in a fresh process.

    python tools/benchmark_start.py --config configs/nemotron-h-8b.yaml [--runs 3] [ENGINE FLAGS]
    python tools/benchmark_start.py --load DIR [--runs 3] [ENGINE FLAGS]
    python tools/benchmark_start.py --cpu-seconds [--runs 5] [--package DIR]

Without `--cpu-seconds`: seconds from the launch of a process to the first token of its first
request, by part. What is compiled is cached in a folder of its own, which is empty at the first
start, a cold one, and has what that has left at the others, of which the medians are shown.
`--cold-runs` says how many are cold. CUDA graphs are captured as a server does it: most of them
later. The prompt is of random tokens. A folder's weights come from the page cache where an earlier
start has left them there.

`--cpu-seconds`: user and system time of all threads on a CPU, of importing the package and building
an engine of the reference model for one rank; medians. `import torch` alone is shown beside them. A
busy machine makes all of them longer: compare runs that were made one after the other.

`--package` names the checkout whose package is started, to compare two.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from megatron_hybrid.arguments import (  # noqa: E402
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.errors import ConfigurationError  # noqa: E402

# Folders of what is compiled: Triton's kernels, flashinfer's, the driver's, torch's.
COMPILER_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
FLASHINFER_CACHE = "FLASHINFER_WORKSPACE_BASE"

CPU_START = """
import json, time
begin = time.process_time()
import torch
torch_alone = time.process_time()
from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.build import build_engine
imported = time.process_time()
build_engine(EngineConfig(device="cpu"))
built = time.process_time()
print(json.dumps({
    "import torch": torch_alone - begin,
    "import the package": imported - torch_alone,
    "build": built - imported,
    "process": built,
}))
"""

# Arguments: when it was launched, by the monotonic clock; the prompt's tokens; the configuration.
START = """
import json, logging, random, sys
launched, length, fields = float(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
from megatron_hybrid.engine.start import StartTimes
start = StartTimes(launched)
from megatron_hybrid import EngineConfig, SamplingParams
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.kernels.compiled import KERNELS
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
engine = build_engine(EngineConfig(**fields), serves=True, start=start)
tokens = [random.Random(0).randrange(engine.vocab_size) for _ in range(length)]
engine.add_request("0", tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
events = []
while not events:
    events = engine.step()
start.end_part("first token")
kernels = {"compiled": KERNELS.compiled, "read": KERNELS.read, "seconds": KERNELS.seconds}
print(json.dumps({"parts": start.parts, "kernels": kernels}))
"""


def run_process(
    program: str, arguments: list[str], package: Path, environment: dict[str, str]
) -> dict[str, dict[str, float]]:
    """What a program prints at its end. Raises CalledProcessError if it fails."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(
    package: Path, fields: dict[str, object], prompt_length: int, caches: Path
) -> dict[str, dict[str, float]]:
    """One start up to its first token: seconds by part, and the kernels that were compiled."""
    environment = {name: str(caches / folder) for name, folder in COMPILER_CACHES.items()}
    # as `megatron-hybrid serve` has it
    environment["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    if os.environ.get("FLASHINFER_DISABLE_JIT") != "1":  # else its kernels were built before
        environment[FLASHINFER_CACHE] = str(caches / "flashinfer")
    arguments = [str(time.monotonic()), str(prompt_length), json.dumps(fields)]
    return run_process(START, arguments, package, environment)


def start_on_cpu(package: Path) -> dict[str, float]:
    """One start of the reference model: CPU seconds by what they went to."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),
    }
    return run_process(CPU_START, [], package, environment)  # type: ignore[return-value]


def table(starts: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """Medians by part, in a column for each kind of start."""
    kinds = {kind: runs for kind, runs in starts.items() if runs}
    names = dict.fromkeys(name for runs in kinds.values() for run in runs for name in run["parts"])
    lines = [f"| seconds | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]

    def add(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    def median(runs: list[dict[str, dict[str, float]]], group: str, name: str) -> float:
        return statistics.median(run[group].get(name, 0.0) for run in runs)

    for name in names:
        add(name, [f"{median(runs, 'parts', name):.2f}" for runs in kinds.values()])
    totals = [[sum(run["parts"].values()) for run in runs] for runs in kinds.values()]
    add("to the first token", [f"{statistics.median(total):.2f}" for total in totals])
    add("lowest to highest", [f"{min(total):.2f} to {max(total):.2f}" for total in totals])
    for name, words in (
        ("compiled", "kernels compiled"),
        ("read", "kernels read from the cache"),
        ("seconds", "seconds of both, side by side"),
    ):
        add(words, [f"{median(runs, 'kernels', name):.4g}" for runs in kinds.values()])
    return "\n".join(lines)


def measure(
    package: Path, fields: dict[str, object], prompt_length: int, cold_runs: int, runs: int
) -> str:
    """The table of so many starts. Each cold one has new caches; the others have the last one's."""
    starts: dict[str, list[dict[str, dict[str, float]]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(cold_runs, 1)):
            caches = Path(folder) / str(number)
            starts["cold"].append(start(package, fields, prompt_length, caches))
        for _ in range(runs):
            starts["warm"].append(start(package, fields, prompt_length, caches))
    return table(starts)


def main() -> int:
    """Measure, and print the medians of some starts."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("benchmark")
    group.add_argument("--runs", type=int, default=3, help="starts with caches (default: 3)")
    group.add_argument("--cold-runs", type=int, default=1, help="starts without (default: 1)")
    group.add_argument(
        "--prompt-length", type=int, default=128, help="tokens of the request (default: 128)"
    )
    group.add_argument(
        "--cpu-seconds", action="store_true", help="of the reference model on a CPU, instead"
    )
    group.add_argument("--package", type=Path, default=ROOT, help="a checkout; ours")
    add_engine_arguments(parser)
    args = parser.parse_args()
    package = args.package.resolve()
    if args.cpu_seconds:
        runs = [start_on_cpu(package) for _ in range(args.runs)]
        for name in runs[0]:
            print(f"{name:20} {statistics.median(run[name] for run in runs):6.2f} s")
        return 0
    try:
        config = engine_config_from_args(args)
    except ConfigurationError as error:
        print(f"benchmark_start.py: {error}", file=sys.stderr)
        return 2
    fields = dict(vars(config))
    if config.load is not None:
        fields["load"] = str(Path(config.load).resolve())  # started in another folder
    print(measure(package, fields, args.prompt_length, args.cold_runs, args.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
