"""Figures of other engines on the same workloads, to stand beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.measurements import Figures
from bench.workloads import DECODES, LONG_PROMPTS


class PeersError(ValueError):
    """A file of peers that can't be used."""


class Compared(NamedTuple):
    """The figure by which engines are compared on a workload."""

    seconds: float  # of whatever it is: less is better
    text: str

    @classmethod
    def of(cls, workload: str, figures: Figures) -> Compared:
        """What the workload shows: time between tokens of those that decode, prompt tokens a second
        of long prompts, the first token of what is resumed, else wall time. Raises KeyError where
        that was not measured."""
        if workload in DECODES:
            milliseconds = figures["steady_itl_ms"]["mean"]
            return cls(milliseconds / 1e3, f"{milliseconds:.2f} ms")
        if workload in LONG_PROMPTS:
            rate = figures["prompt_tok_s"]
            return cls(1 / rate, f"{rate:,.0f} tok/s")
        if workload == "long_resume":
            seconds = figures["rounds"][-1]["ttft_s"]["mean"]
            return cls(seconds, f"{1e3 * seconds:.0f} ms")
        return cls(figures["wall_s"], f"{figures['wall_s']:.2f} s")


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine. `models`: model -> workload -> mode -> figures, of which some may be missing, but
    not the one that is compared."""

    name: str
    source: str  # where, when and how it was measured
    models: dict[str, dict[str, dict[str, Figures]]]

    def modes(self, model: str, workload: str) -> dict[str, Figures]:
        """Its ways of running a workload; empty where it was not measured."""
        return self.models.get(model, {}).get(workload, {})

    def best(self, model: str, workload: str) -> tuple[str, Compared] | None:
        """The mode in which it is the fastest; None where it was not measured."""
        modes = self.modes(model, workload)
        compared = [(mode, Compared.of(workload, figures)) for mode, figures in modes.items()]
        return min(compared, key=lambda one: one[1].seconds, default=None)


def load_peers(path: Path) -> list[Peer]:
    """Raises PeersError for a file that is no such table."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        peers = [Peer(one["name"], one["source"], one["models"]) for one in values["peers"]]
        for peer in peers:
            for model, workloads in peer.models.items():
                for workload in workloads:
                    peer.best(model, workload)
    except OSError as error:
        raise PeersError(f"--peer {path} cannot be read: {error.strerror}.") from error
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise PeersError(
            f"--peer {path} is no table of peers ({error!r}); docs/peers.json is one."
        ) from error
    return peers


def peers_of(peers: Sequence[Peer], model: str) -> list[Peer]:
    """Those that ran this model."""
    return [peer for peer in peers if model in peer.models]


def summary_head(peers: Sequence[Peer] = ()) -> str:
    """Head of a table of runs, with a column a peer. Padded, so that a terminal shows it as a table
    and a Markdown page takes it as it is."""
    head = (
        f"| {'workload':13} | {'wall s (all runs)':28} | {'tok/s':>9} "
        f"| {'cached / computed':>17} | {'TTFT mean / p95 ms':>18} | {'steady ITL ms':>13} |"
    )
    columns = "".join(f" {_title(peer):{_width(peer)}} |" for peer in peers)
    return f"{head}{columns}\n|{'---|' * (6 + len(peers))}"


def summary_row(result: Figures, peers: Sequence[Peer] = (), model: str = "") -> str:
    """A row below it: our median run, and of each peer its best mode, and our time over its. Where
    answers are of one token, tokens a second are those of prompts."""
    ttft = result["ttft_s"]
    runs = f"**{result['wall_s']:.3f}** ({', '.join(f'{wall:.3f}' for wall in result['walls_s'])})"
    speed = f"{result['output_tok_s']:.0f}"
    if result["output_tokens"] == result["requests"]:
        speed = f"{result['prompt_tok_s']:.0f} in"
    tokens = f"{result['cached_tokens']} / {result['computed_tokens']}"
    first = f"{1e3 * ttft['mean']:.1f} / {1e3 * ttft['p95']:.1f}"
    steady = result["steady_itl_ms"].get("mean")
    between = "" if steady is None else f"{steady:.2f}"
    row = (
        f"| {result['workload']:13} | {runs:28} | {speed:>9} | {tokens:>17} "
        f"| {first:>18} | {between:>13} |"
    )
    return row + "".join(f" {_beside(result, peer, model):{_width(peer)}} |" for peer in peers)


def _beside(result: Figures, peer: Peer, model: str) -> str:
    best = peer.best(model, result["workload"])
    if best is None:
        return ""
    mode, theirs = best
    ours = Compared.of(result["workload"], result)
    return f"{theirs.text} ({mode}), {ours.seconds / theirs.seconds:.3f}"


def _title(peer: Peer) -> str:
    return f"{peer.name} (mode), ours / it"


def _width(peer: Peer) -> int:
    return max(len(_title(peer)), 24)
