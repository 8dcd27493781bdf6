#!/usr/bin/env python
"""Which test cases notice a wrong line: small wrong changes (mutants) to the policy's files, each
shown to the cases that run its line, the cheapest first, until one fails.

    python tools/mutation_matrix.py cover  --folder runs/mutation -n 3   # what each case runs
    python tools/mutation_matrix.py run    --folder runs/mutation --count 600 --jobs 2
    python tools/mutation_matrix.py report --folder runs/mutation

`cover` runs the suite once (TESTS=all: all of it) and needs `pip install coverage`. `run` draws the
same mutants for the same seed, and goes on where it was cut off. A case that CI leaves out is tried
only on mutants that no case of CI's kills, so the report's last column is what CI would miss.
docs/testing.md has the results and their date.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mutation.mutants import Mutant, mutants_of
from mutation.one import show

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_hybrid"
# The rooms of policy, and those files of execution/ that plan: no tensor's value is decided there.
TARGETS = ("cache/*.py", "engine/*.py", "execution/plan.py", "execution/rows.py",
           "execution/lockstep.py", "execution/cuda_graphs.py", "execution/random_streams.py",
           "execution/batch.py", "execution/decode_inputs.py", "execution/figures.py",
           "execution/runs.py")  # fmt: skip
NOT_POLICY = ("engine/profiling.py",)  # runs on a GPU alone
# Mutants are forked from a process that has imported torch: that takes longer than to kill most.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["mutation.preloaded"])
SLOWER = 10.0  # a case that takes so many times as long as it did has noticed
LEAST_SECONDS = 30.0
FEW_SECONDS = 15.0  # of a file's cases, in one round
OWN_SECONDS = 60.0  # of the cases of a room's own files, in the second round


class Case(NamedTuple):
    name: str
    seconds: float


def main() -> int:
    args = parse_arguments()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.command == "cover":
        return cover(args.folder, args.pytest)
    if args.command == "run":
        return run(args.folder, args.count, args.seed, args.jobs, args.rounds)
    return report(args.folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("cover", "run", "report"))
    parser.add_argument("--folder", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--count", type=int, default=600, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--rounds", type=int, default=2, help="4: survivors are shown every case")
    args, rest = parser.parse_known_args()
    args.pytest = rest
    return args


def targets() -> list[Path]:
    found = {path for glob in TARGETS for path in PACKAGE.glob(glob)}
    return sorted(found - {PACKAGE / name for name in NOT_POLICY})


# -- what each case runs


def cover(folder: Path, arguments: list[str]) -> int:
    """Run the suite once, with `arguments` for pytest; its exit status."""
    settings = folder / "settings"
    files = "\n    ".join(map(str, targets()))
    settings.write_text(
        f"[run]\nparallel = true\nsigterm = true\ndata_file = {folder}/coverage\n"
        f"include =\n    {files}\n"
    )
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "mutation.watching", *arguments],
        cwd=ROOT,
        env=environment(COVERAGE_PROCESS_START=str(settings), MUTATION_COSTS=str(folder)),
    ).returncode
    command = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"]
    subprocess.run(command, cwd=folder, env=environment(), check=True)
    return status


def environment(**more: str) -> dict[str, str]:
    paths = [ROOT / "tools" / "mutation", ROOT / "tools", ROOT, os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)).rstrip(":"),
        # Compiling what is imported would take most of a mutant's time.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(Path(sys.prefix) / "bytecode"),
    }
    return os.environ | ours | more


def read_costs(folder: Path) -> dict[str, Case]:
    lines = [line for path in folder.glob("costs-*.jsonl") for line in path.open()]
    return {name: Case(name, seconds) for name, _, seconds in map(json.loads, lines)}


class Coverage:
    """Which cases run which lines, from coverage's own database."""

    def __init__(self, folder: Path, costs: dict[str, Case]) -> None:
        self._lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        of_file = defaultdict(list)
        for name in costs:
            of_file[name.partition("::")[0]].append(name)
        data = sqlite3.connect(folder / "coverage")
        query = (
            "select file.path, context.context, line_bits.numbits from line_bits "
            "join file on file.id = line_bits.file_id join context on context.id = context_id"
        )
        for path, context, bits in data.execute(query):
            name = Path(path).relative_to(ROOT).as_posix()
            if context.startswith("process:"):
                # A file's cases share the processes that the first of them starts.
                cases = of_file[context.removeprefix("process:").partition("::")[0]]
            else:
                cases = [context] if context in costs else []
            for line in _lines_of(bits):
                self._lines[name, line].update(cases)
        self._in_functions = {
            path.relative_to(ROOT).as_posix(): lines_in_functions(path) for path in targets()
        }

    def is_run(self, mutant: Mutant) -> bool:
        """Whether its line is run by any case, or when its file is imported."""
        return (mutant.file, mutant.line) in self._lines

    def cases(self, mutant: Mutant) -> set[str]:
        """Those that run its line; or, since an import belongs to no case, any of its file."""
        inside = self._in_functions[mutant.file]
        lines = (mutant.line,) if mutant.line in inside else sorted(inside)
        return set().union(*(self._lines.get((mutant.file, line), ()) for line in lines))


def lines_in_functions(path: Path) -> set[int]:
    """The lines that do not run when the file is imported."""
    return {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
        for line in range(node.body[0].lineno, node.end_lineno + 1)
    }


def _lines_of(bits: bytes) -> Iterable[int]:
    return (8 * byte + bit for byte, some in enumerate(bits) for bit in range(8) if some >> bit & 1)


# -- what each case notices


def run(folder: Path, count: int, seed: int, jobs: int, rounds: int) -> int:
    """Show every mutant of the sample to its cases; the results go to `results.jsonl`."""
    os.environ.update(environment())  # which mutants inherit
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    costs = read_costs(folder)
    coverage = Coverage(folder, costs)
    sample = draw(coverage, count, seed)
    results = folder / "results.jsonl"
    in_ci = cases_of_ci()
    survived = {
        (r["file"], r["number"]): r["rounds"] for r in read_results(folder) if r["by"] is None
    }
    # Done: killed by a case that CI still runs, or by none in as many rounds.
    done = {
        (r["file"], r["number"])
        for r in read_results(folder)
        if (r["killer"] in in_ci if r["by"] == "ci" else r["by"] is None and r["rounds"] >= rounds)
        or str(r["killer"]).startswith("(")
    }
    left = [mutant for mutant in sample if (mutant.file, mutant.number) not in done]
    print(f"{len(sample)} mutants, {len(sample) - len(left)} of them done")

    def one(mutant: Mutant) -> None:
        begun, first = time.monotonic(), survived.get((mutant.file, mutant.number), 0)
        cases = [costs[name] for name in coverage.cases(mutant)]
        found = {**mutant._asdict(), "cases": len(cases), "killer": None, "by": None}
        for by, some in (
            ("ci", [case for case in cases if case.name in in_ci]),
            ("all", [case for case in cases if case.name not in in_ci]),
        ):
            for shown in rounds_of(some, mutant.file.split("/")[1])[first:rounds]:
                if found["by"] is None and (killer := kill(mutant, shown, tests=by)):
                    found |= {"killer": killer, "by": by}
        found |= {"rounds": rounds, "seconds": round(time.monotonic() - begun, 1)}
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{found['by'] or 'SURVIVED'}: {mutant.file}:{mutant.line} {mutant.change}"
              f" ({len(cases)} cases, {found['seconds']} s)", flush=True)  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))
    return report(folder)


def draw(coverage: Coverage, count: int, seed: int) -> list[Mutant]:
    """A sample of the mutants on lines that some case runs; a larger one begins with a smaller."""
    every = [mutant for path in targets() for mutant in mutants_of(path, ROOT)]
    covered = [mutant for mutant in every if coverage.is_run(mutant)]
    print(f"{len(every)} mutants, {len(covered)} of them on lines that some case runs")
    random.Random(seed).shuffle(covered)
    return covered[:count]


def cases_of_ci() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "mutation.watching"]
    told = environment(MUTATION_LIST_CI="1", TESTS="ci")
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def rounds_of(cases: list[Case], room: str) -> list[list[Case]]:
    """In which order a mutant of `room` is shown its cases: files that cost little, some cases of
    some others in the room's own tests, some of each other file, the rest. Most mutants die at
    once, and those that survive could be shown hours of them.
    """
    of_file: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: case.seconds):
        of_file[case.name.partition("::")[0]].append(case)
    rounds: list[list[Case]] = [[], [], [], []]
    own = 0.0
    for path, some in sorted(of_file.items(), key=lambda of: sum(case.seconds for case in of[1])):
        costs = list(itertools.accumulate(case.seconds for case in some))
        few = 1 if path.startswith(f"tests/{room}/") and own < OWN_SECONDS else 2
        own += min(costs[-1], FEW_SECONDS) if few == 1 and costs[-1] >= FEW_SECONDS else 0.0
        for number, (case, cost) in enumerate(zip(some, costs, strict=True)):
            is_few = cost < (FEW_SECONDS if number else 2 * FEW_SECONDS)
            rounds[0 if costs[-1] < FEW_SECONDS else few if is_few else 3].append(case)
    return rounds


def kill(mutant: Mutant, cases: list[Case], tests: str) -> str | None:
    """The first case that fails with TESTS=`tests`."""
    if not cases:
        return None
    seconds = {case.name: max(LEAST_SECONDS, SLOWER * case.seconds) for case in cases}
    limit = SLOWER * sum(case.seconds for case in cases) + 2 * LEAST_SECONDS
    receiver, sender = _forks.Pipe(duplex=False)
    told = (f"{ROOT / mutant.file}:{mutant.number}", seconds, tests, sender)
    process = _forks.Process(target=show, args=told)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit) else "(too long)"
    except EOFError:
        return "(the process ended)"
    finally:
        process.kill()


# -- what came of it


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The last one of each mutant."""
    path = folder / "results.jsonl"
    every = [json.loads(line) for line in path.open()] if path.exists() else []
    return list({(result["file"], result["number"]): result for result in every}.values())


def report(folder: Path) -> int:
    """Print the table by room; 1 if CI misses a mutant that the whole suite kills."""
    by_room: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    results = read_results(folder)
    for result in results:
        room = "/".join(str(result["file"]).split("/")[1:-1])
        for name in (room, "together"):
            by_room[name][str(result["by"])] += 1
    print(f"{'room':12} {'mutants':>8} {'killed in CI':>13} {'survive all':>12} {'CI misses':>10}")
    for room, counts in by_room.items():
        total = sum(counts.values())
        print(f"{room:12} {total:8} {counts['ci']:13} {counts['None']:12} {counts['all']:10}")
    for result in results:
        if result["by"] != "ci":
            print(f"{result['by'] or 'survives':9} {result['file']}:{result['line']}"
                  f" {result['change']} {result['killer'] or ''}")  # fmt: skip
    return int(by_room["together"]["all"] > 0)


if __name__ == "__main__":
    sys.exit(main())
