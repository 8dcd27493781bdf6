"""A PNG of one serving run: how long tokens took, and how many came in each second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.serving_metrics import metric_samples, tokens_per_second
from bench.serving_requests import Outcome


def plot_serving(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Distributions of TTFT and ITL with their medians and 99th percentiles, and throughput over
    time. Raises ImportError without matplotlib."""
    import numpy as np

    from simulation.plots import load_matplotlib

    pyplot = load_matplotlib()
    samples = metric_samples(outcomes)
    figure, (ttft, itl, throughput) = pyplot.subplots(3, 1, figsize=(8, 9))
    for panel, name, label in (
        (ttft, "ttft", "time to first token, ms"),
        (itl, "itl", "time between tokens, ms"),
    ):
        values = samples[name]
        panel.set(xlabel=label, ylabel="requests" if name == "ttft" else "gaps")
        if values:
            panel.hist(values, bins=60, color="tab:blue", alpha=0.7)
            for percentile, style in ((50, "-"), (99, "--")):
                value = float(np.percentile(values, percentile))
                panel.axvline(
                    value, color="black", linestyle=style, label=f"p{percentile}: {value:.1f}"
                )
            panel.legend(fontsize=8)
    seconds = tokens_per_second(outcomes)
    throughput.step(range(len(seconds)), seconds, where="post")
    throughput.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    for panel in (ttft, itl, throughput):
        panel.grid(alpha=0.3)
    ttft.set_title(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
