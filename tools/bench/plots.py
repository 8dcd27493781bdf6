"""PNG plots of measured workloads. matplotlib is imported only here, and only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measurements import Figures
from bench.peers import Peer
from bench.workloads import LONG_PROMPTS


class _Panel(NamedTuple):
    label: str  # with the unit
    value: Callable[[Figures], float | None]  # of a run; None: it has none
    workloads: Sequence[str] | None = None  # None: all


_PANELS = (
    _Panel("wall time, s", lambda figures: figures.get("wall_s")),
    _Panel("time to first token, mean, s", lambda figures: figures.get("ttft_s", {}).get("mean")),
    _Panel(
        "steady time between tokens, mean, ms",
        lambda figures: figures.get("steady_itl_ms", {}).get("mean"),
    ),
    _Panel("prompt tokens a second", lambda figures: figures.get("prompt_tok_s"), LONG_PROMPTS),
)


def plot_workloads(
    results: Sequence[Figures], model: str, peers: Sequence[Peer], path: Path, title: str
) -> None:
    """A panel a figure that we have: a group of bars a workload, ours first, then each mode of each
    peer. The scales are logarithmic, the figures stand on our bars. Raises ImportError without
    matplotlib."""
    from simulation.plots import load_matplotlib

    pyplot = load_matplotlib()
    names = [result["workload"] for result in results]
    bars: dict[str, list[Figures]] = {"megatron-hybrid": list(results)}
    for peer in peers:
        for mode in dict.fromkeys(mode for name in names for mode in peer.modes(model, name)):
            bars[f"{peer.name}, {mode}"] = [peer.modes(model, name).get(mode, {}) for name in names]
    shown = [panel for panel in _PANELS if any(_heights(panel, names, results))]
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(2 + 1.4 * len(names), 3 * len(shown)), squeeze=False
    )
    width = 0.8 / len(bars)
    for axis, panel in zip(axes[:, 0], shown, strict=True):
        for number, (name, runs) in enumerate(bars.items()):
            shift = (number - (len(bars) - 1) / 2) * width
            heights = _heights(panel, names, runs)
            there = [i for i, height in enumerate(heights) if height]
            drawn = axis.bar(
                [i + shift for i in there], [heights[i] for i in there], width, label=name
            )
            if number == 0:
                axis.bar_label(drawn, fmt="%.3g", fontsize=7)
        axis.set(ylabel=panel.label, yscale="log", xlim=(-0.5, len(names) - 0.5))
        axis.set_xticks(range(len(names)), names)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].set_title(title)
    axes[0, 0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _heights(panel: _Panel, names: Sequence[str], runs: Sequence[Figures]) -> list[float | None]:
    """Of the bars of these runs, a workload each."""
    return [
        panel.value(run) if panel.workloads is None or name in panel.workloads else None
        for name, run in zip(names, runs, strict=True)
    ]
