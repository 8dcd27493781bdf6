"""Figures of other engines on the same workloads, to stand beside ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a row needs to be shown; docs/peers.json has more.
_NEEDED = {"wall_s", "cached_tokens", "prompt_tokens", "ttft_s", "steady_itl_ms"}

Figures = dict[str, Any]  # keys as in measurements.summarize


class PeersError(ValueError):
    """A file of peers that can't be used."""


@dataclass(frozen=True, slots=True)
class Peers:
    name: str  # of the engine
    source: str  # where, when and how it was measured
    models: dict[str, dict[str, dict[str, Figures]]]  # model -> workload -> mode -> figures

    @classmethod
    def load(cls, path: Path) -> Peers:
        """Raises PeersError for a file that is no such table."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            peers = cls(values["peer"], values["source"], values["models"])
            for workloads in peers.models.values():
                for modes in workloads.values():
                    for figures in modes.values():
                        if missing := _NEEDED - figures.keys():
                            raise KeyError(", ".join(sorted(missing)))
        except OSError as error:
            raise PeersError(f"--peer {path} cannot be read: {error.strerror}.") from error
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PeersError(
                f"--peer {path} is no table of peers ({error!r}); docs/peers.json is one."
            ) from error
        return peers

    def modes(self, model: str, workload: str) -> dict[str, Figures]:
        """The peer's ways of running a workload; empty where it was not measured."""
        return self.models.get(model, {}).get(workload, {})


# Padded, so that a terminal shows it as a table and a Markdown page takes it as it is.
SUMMARY_HEAD = (
    f"| {'workload':13} | {'wall s (all runs)':28} | {'tok/s':>6} | {'cached / computed':>15} "
    f"| {'TTFT mean / p95 ms':>18} | {'steady ITL ms':>13} | {'peer, wall s':34} | ours / best |\n"
    "|---|---|---|---|---|---|---|---|"
)


def summary_row(result: Figures, modes: dict[str, Figures]) -> str:
    """A row below SUMMARY_HEAD: our median run, and the peer's wall seconds in each mode."""
    ttft = result["ttft_s"]
    runs = f"**{result['wall_s']:.3f}** ({', '.join(f'{wall:.3f}' for wall in result['walls_s'])})"
    tokens = f"{result['cached_tokens']} / {result['computed_tokens']}"
    first = f"{1e3 * ttft['mean']:.1f} / {1e3 * ttft['p95']:.1f}"
    steady = result["steady_itl_ms"].get("mean", float("nan"))
    theirs = ", ".join(f"{mode} {figures['wall_s']:.2f}" for mode, figures in modes.items())
    best = min((figures["wall_s"] for figures in modes.values()), default=0.0)
    ratio = f"{result['wall_s'] / best:.3f}" if best else ""
    return (
        f"| {result['workload']:13} | {runs:28} | {result['output_tok_s']:6.0f} | {tokens:>15} "
        f"| {first:>18} | {steady:13.2f} | {theirs:34} | {ratio:>11} |"
    )
