"""Tables of simulated results, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from simulation.pools import SHAPES
from simulation.sweep import Outcome, Reference

_NO_SPLIT = " " * len(" (50%)")


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a header: the first one left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def traces_table(references: Sequence[Reference]) -> str:
    """What the workloads are, and the oracle's share of each."""
    header = "trace seed requests prompt output oracle unlimited working-set state".split()
    return text_table(
        header,
        (
            (
                r.workload.trace,
                str(r.workload.seed),
                f"{r.workload.requests:,}",
                f"{r.prompt_tokens / r.workload.requests:,.0f}",
                f"{r.output_tokens / r.sequences:,.0f}",
                _percent(r.oracle_share),
                "-" if r.unlimited is None else f"{r.unlimited.skipped_share:.1%}",
                "-" if r.unlimited is None else f"{r.working_set / 2**30:,.0f} GiB",
                f"{SHAPES[r.workload.shape].bytes_per_state / 2**20:.0f} MiB",
            )
            for r in references
        ),
    )


def skipped_table(reference: Reference, best: Sequence[Outcome]) -> str:
    """Skipped share of the prompt tokens: a row a policy, a column a pool size; in brackets the
    share of the pool that the best split gives to states."""
    own = [o for o in best if o.cell.workload == reference.workload]
    pools = sorted({o.cell.pool for o in own})
    policies = list(dict.fromkeys(o.cell.name for o in own))
    by_place = {(o.cell.name, o.cell.pool): o for o in own}
    rows = [
        [policy, *(_share(by_place.get((policy, pool))) for pool in pools)] for policy in policies
    ]
    rows.append(["oracle", *(_percent(reference.oracle_share) + _NO_SPLIT for _ in pools)])
    name = f"{reference.workload.trace} (seed {reference.workload.seed})"
    return text_table([name, *(f"{pool.name}{_NO_SPLIT}" for pool in pools)], rows)


def timing_table(best: Sequence[Outcome]) -> str:
    """What decisions cost, by policy and size of the cache: scheduling by step and by sequence,
    and the whole simulation by request."""
    rows = [
        (
            o.cell.name,
            o.cell.workload.trace,
            f"{o.cache_entries:,}",
            f"{1e6 * o.result.scheduler_seconds / o.result.executed_steps:.0f}",
            f"{1e6 * o.result.scheduler_seconds / o.result.sequences:.0f}",
            f"{1e6 * o.result.seconds / o.result.requests:.0f}",
        )
        for o in sorted(best, key=lambda o: (o.cell.name, o.cell.workload.trace, o.cache_entries))
        if o.result is not None
    ]
    return text_table(
        ["policy", "trace", "cache entries", "us/step", "us/sequence", "all us/request"], rows
    )


def as_json(references: Sequence[Reference], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that was measured, with every split."""
    return {
        "references": [
            asdict(r) | {"oracle_share": r.oracle_share, "working_set": r.working_set}
            for r in references
        ],
        "outcomes": [asdict(o) | {"skipped_share": o.skipped_share} for o in outcomes],
    }


def _share(outcome: Outcome | None) -> str:
    if outcome is None or outcome.result is None:
        return f"-{_NO_SPLIT}"
    return f"{outcome.skipped_share:.1%} ({outcome.cell.split:.0%})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
