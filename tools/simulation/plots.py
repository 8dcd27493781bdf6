"""PNG plots of simulated results. matplotlib is imported only here, and only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulation.sweep import Outcome, Reference

STYLES = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "*-", "<-", ">-")


def load_matplotlib() -> Any:
    """pyplot without a display. Raises ImportError that says what to install."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: pip install matplotlib, or leave out --plot."
        ) from error
    return pyplot


def plot_skipped(references: Sequence[Reference], best: Sequence[Outcome], path: Path) -> None:
    """Skipped share against pool size: a panel a trace, a line a policy, the oracle above.

    With several seeds the lines are means.
    """
    working_sets = {r.workload: r.working_set for r in references}
    pyplot = load_matplotlib()
    traces = list(dict.fromkeys(r.workload.trace for r in references))
    figure, panels = pyplot.subplots(
        1, len(traces), figsize=(1 + 3.6 * len(traces), 4), sharey=True, squeeze=False
    )
    for panel, trace in zip(panels[0], traces, strict=True):
        own = [o for o in best if o.cell.workload.trace == trace and o.result is not None]
        policies = list(dict.fromkeys(o.cell.name for o in own))
        for policy, style in zip(policies, STYLES * len(policies), strict=False):
            shares: dict[float, list[float]] = {}
            for o in own:
                if o.cell.name == policy:
                    size: float = o.cell.pool.bytes
                    if working_set := working_sets[o.cell.workload]:
                        size = round(100 * size / working_set, 3)
                    shares.setdefault(size, []).append(100 * o.skipped_share)
            sizes = sorted(shares)
            means = [sum(shares[size]) / len(shares[size]) for size in sizes]
            panel.plot(sizes, means, style, label=policy, markersize=4)
        own_references = [r for r in references if r.workload.trace == trace]
        bounds = [100 * r.oracle_share for r in own_references if r.oracle_share is not None]
        if bounds:
            panel.axhline(sum(bounds) / len(bounds), color="black", linestyle=":", label="oracle")
        unit = "% of the working set" if any(working_sets.values()) else "bytes"
        panel.set(title=trace, xscale="log", xlabel=f"pool, {unit}", ylim=(0, 100))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("prompt tokens skipped, %")
    panels[0][-1].legend(fontsize=8, loc="lower right")
    _save(pyplot, figure, path)


def plot_decision_time(best: Sequence[Outcome], path: Path) -> None:
    """Microseconds of scheduling for each executed step against the size of the cache."""
    pyplot = load_matplotlib()
    figure, panel = pyplot.subplots(figsize=(6, 4))
    done = [o for o in best if o.result is not None]
    policies = list(dict.fromkeys(o.cell.name for o in done))
    for policy, style in zip(policies, STYLES * len(policies), strict=False):
        points = sorted(
            (o.cache_entries, 1e6 * o.result.scheduler_seconds / o.result.executed_steps)
            for o in done
            if o.cell.name == policy and o.result is not None
        )
        panel.plot(*zip(*points, strict=True), style[0], label=policy, markersize=4)
    panel.set(xscale="log", xlabel="KV blocks and states in the cache", ylim=(0, None))
    panel.set_ylabel("scheduling, microseconds a step")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
