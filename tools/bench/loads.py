"""The command line of a benchmark of several loads on engines of this process's flags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.environment import describe_environment
from megatron_hybrid import EngineConfig
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.errors import ConfigurationError

Figures = dict[str, Any]
# With names of loads, and by how much all sizes are multiplied: figures by load, as they come.
Measure: TypeAlias = Callable[[EngineConfig, Sequence[str], float], Iterator[tuple[str, Figures]]]


def run_loads(
    description: str, loads: Sequence[str], measure: Measure, usual: Sequence[str] | None = None
) -> int:
    """What `main` returns. usual: loads that are measured unless others are named; None: all."""
    parser = ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(loads if usual is None else usual)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--load-names", default=names, help=f"which (default: {names})")
    group.add_argument("--scale", type=float, default=0.02, help="of all sizes (default: 0.02)")
    group.add_argument("--json", type=Path, metavar="OUT", help="write the figures there, too")
    add_engine_arguments(parser)
    args = parser.parse_args()
    wanted = args.load_names.split(",")
    if unknown := sorted(set(wanted) - set(loads)):
        parser.error(f"--load-names {unknown[0]} is none of {', '.join(loads)}.")
    found: dict[str, Figures] = {}
    try:
        for name, figures in measure(engine_config_from_args(args), wanted, args.scale):
            found[name] = figures
            shown = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items())
            print(f"{name}: {shown}", flush=True)
    except ConfigurationError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        report = {**describe_environment(), "scale": args.scale, "loads": found}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)
