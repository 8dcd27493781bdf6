"""PNG plots of measured workloads. matplotlib is imported only here, and only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import Figures, Peers

# (title, unit, what to show of a run)
_PANELS: tuple[tuple[str, Any], ...] = (
    ("wall time, s", lambda figures: figures["wall_s"]),
    ("time to first token, mean, s", lambda figures: figures["ttft_s"]["mean"]),
    (
        "steady time between tokens, mean, ms",
        lambda figures: figures["steady_itl_ms"].get("mean", 0.0),
    ),
)


def plot_workloads(
    results: Sequence[Figures], model: str, peers: Peers | None, path: Path, title: str
) -> None:
    """A panel a figure: a group of bars a workload, ours first, then the peer's modes. The scales
    are logarithmic, the figures stand on our bars. Raises ImportError without matplotlib."""
    from simulation.plots import load_matplotlib

    pyplot = load_matplotlib()
    names = [result["workload"] for result in results]
    bars: dict[str, list[Figures | None]] = {"megatron-hybrid": list(results)}
    if peers is not None:
        modes = list(dict.fromkeys(mode for name in names for mode in peers.modes(model, name)))
        for mode in modes:
            label = f"{peers.name}, {mode}"
            bars[label] = [peers.modes(model, name).get(mode) for name in names]
    figure, panels = pyplot.subplots(len(_PANELS), 1, figsize=(2 + 1.4 * len(names), 9))
    width = 0.8 / len(bars)
    for panel, (label, value) in zip(panels, _PANELS, strict=True):
        for number, (name, runs) in enumerate(bars.items()):
            places = [
                i + (number - (len(bars) - 1) / 2) * width for i, run in enumerate(runs) if run
            ]
            drawn = panel.bar(places, [value(run) for run in runs if run], width, label=name)
            if number == 0:
                panel.bar_label(drawn, fmt="%.3g", fontsize=7)
        panel.set(ylabel=label, yscale="log")
        panel.set_xticks(range(len(names)), names)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_title(title)
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
