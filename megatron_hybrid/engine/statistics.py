"""Counters of one engine: what was computed, what was skipped, and why it was not more."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache import tier
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.latency import Latencies
from megatron_hybrid.engine.tracked_request import Running, TrackedRequest
from megatron_hybrid.request import FinishReason

logger = logging.getLogger(__name__)

Figures = dict[str, Any]  # names to numbers, or to further figures

TOTALS = (
    "steps",
    "requests_admitted",  # each request once
    "prompt_tokens",  # of admitted requests
    "computed_tokens",  # prompt tokens, each once: computed + skipped = prompt tokens
    "skipped_tokens",  # prompt tokens that came from the cache
    "recomputed_tokens",  # computed again by preempted requests
    "reskipped_tokens",  # skipped by preempted requests that had computed them before
    "matched_tokens",  # prompt tokens whose KV was in the cache
    "decode_tokens",
    "generated_tokens",
    "preemptions",
    "twins_waited",  # requests
    "twin_deferrals",  # requests times steps
    "twin_tokens_saved",
    "drafts",  # requests times steps that had any
    "draft_tokens",
    "accepted_tokens",  # drafts that were accepted
)


class Statistics:
    """Cumulative figures of the scheduler, and the last step's share of them.

    latencies: told of admissions, preemptions and ends, too.
    """

    def __init__(self, cache: HybridCache, latencies: Latencies) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self.requests_finished: Counter[str] = Counter()  # by finish reason
        self.lost_tokens: Counter[str] = Counter()  # matched, computed again; by cause
        self._accepted: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # by position
        self.weight_bytes: dict[str, int] = {}  # by format; of whoever loads the model
        self.start_seconds: dict[str, float] = {}  # by part; of whoever starts the engine
        self.step = 0
        self.running = 0
        self.waiting = 0
        self._cache = cache
        self._latencies = latencies
        self._before = self._figures()

    def begin_step(self) -> None:
        """What is counted from now on belongs to the coming step."""
        self._before = self._figures()

    def count_admission(self, running: Running, match: PrefixMatch) -> None:
        """A request was admitted, for the first time or once more."""
        request, lease, totals = running.request, running.lease, self.totals
        own = request.counters
        self._latencies.was_admitted(request)
        if not own["prompt_tokens"]:
            own["prompt_tokens"] = request.prompt_tokens
            own["matched_tokens"] = match.matched_tokens
            totals["requests_admitted"] += 1
            totals["prompt_tokens"] += request.prompt_tokens
            totals["matched_tokens"] += match.matched_tokens
            self.lost_tokens.update(lease.lost_tokens)
            own.update({f"lost_{cause}": n for cause, n in lease.lost_tokens.items()})
            if request.deferrals:
                saved = lease.skip - request.skip_at_first_deferral
                totals["twins_waited"] += 1
                totals["twin_tokens_saved"] += saved
                own["twin_deferrals"] = request.deferrals
                own["twin_tokens_saved"] = saved
        # what it had computed or skipped before it was preempted is not counted twice
        first_time = max(0, min(lease.skip, request.prompt_tokens) - request.seen)
        self._count(request, "skipped_tokens", first_time)
        self._count(request, "reskipped_tokens", lease.skip - first_time)
        request.seen = max(request.seen, lease.skip)

    def count_preemption(self, running: Running) -> None:
        """A running request is about to give back its row and what it holds."""
        self._count(running.request, "preemptions", 1)
        self._latencies.will_be_preempted(running)

    def count_end(self, request: TrackedRequest, reason: FinishReason) -> None:
        """A request ended, running or not."""
        self.requests_finished[reason.value] += 1
        self._latencies.has_finished(request)

    def count_computed(self, request: TrackedRequest, start: int, end: int) -> None:
        """Tokens [start, end) of a request that is prefilled were computed."""
        first_time = max(0, min(end, request.prompt_tokens) - max(start, request.seen))
        self._count(request, "computed_tokens", first_time)
        self._count(request, "recomputed_tokens", end - start - first_time)
        request.seen = max(request.seen, end)

    def count_drafts(self, drafted: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64]) -> None:
        """Drafts of a step, and how many were accepted; [requests] each."""
        self.totals["drafts"] += int(np.count_nonzero(drafted))
        self.totals["draft_tokens"] += int(drafted.sum())
        self.totals["accepted_tokens"] += int(accepted.sum())
        # of n accepted drafts each of the first n positions has one
        here = np.bincount(accepted)[::-1].cumsum()[::-1][1:]
        if len(here) > len(self._accepted):
            self._accepted = np.pad(self._accepted, (0, len(here) - len(self._accepted)))
        self._accepted[: len(here)] += here

    def as_dict(self) -> Figures:
        """Everything a user may want to know, as plain numbers."""
        figures = self._figures()
        tiers = self._cache.tier.figures()
        return {
            **figures,
            **self._cache.occupancy()._asdict(),
            **{name: tiers[name] for name in tier.GAUGES},
            "weight_bytes": self.weight_bytes,
            "start_seconds": self.start_seconds,
            "last_step": {"step": self.step, **_difference(figures, self._before)},
        }

    def log(self, interval: int) -> None:
        """Every so many steps, in the log; 0: never."""
        if interval and self.totals["steps"] % interval == 0:
            logger.info("%s", self.log_line())

    def log_line(self) -> str:
        """The periodic log, in Megatron's words."""
        totals, use = self.totals, self._cache.occupancy()
        computed, skipped = totals["computed_tokens"], totals["skipped_tokens"]
        share = 100.0 * skipped / (computed + skipped) if computed + skipped else 0.0
        line = (
            f"step {totals['steps']}: {self.running} running, {self.waiting} waiting | "
            f"prefill (cumul): computed {computed}, skipped {skipped} ({share:.1f}% skipped) | "
            f"prefix cache util: KV {use.kv_cached}/{use.kv_blocks} blocks cached "
            f"({use.kv_evictable} evictable), mamba {use.state_cached}/{use.state_slots} slots"
        )
        if use.window_blocks:
            line += f", windows {use.window_used}/{use.window_blocks} blocks"
        more = {
            "lost": self.lost_tokens,
            "checkpoints published": self._cache.checkpoints_published,
            "checkpoints read": self._cache.checkpoints_read,
        }
        for name, counts in more.items():
            if counts:
                line += f" | {name}: " + ", ".join(f"{k} {n}" for k, n in sorted(counts.items()))
        if totals["drafts"]:
            share = 100.0 * totals["accepted_tokens"] / max(totals["draft_tokens"], 1)
            length = 1 + totals["accepted_tokens"] / totals["drafts"]
            line += (
                f" | drafts: {share:.1f}% of {totals['draft_tokens']} tokens accepted, "
                f"{length:.2f} tokens a step"
            )
        tiers = self._cache.tier.figures()
        for name, size in tiers["tier_bytes"].items():
            used, states = tiers["tier_bytes_used"][name], tiers["tier_states"][name]
            line += (
                f" | {name}: {used / GIB:.2f}/{size / GIB:.2f} GB, {states} states, "
                f"{tiers['tier_writes'][name]} written, {tiers['tier_fetches'][name]} fetched "
                f"({tiers['tier_tokens_fetched'][name]} tokens)"
            )
        others = {
            "checkpoints skipped": self._cache.checkpoints_skipped,
            "evicted blocks": self._cache.kv.evictions,
            "evicted states": self._cache.states.evictions,
            "twins waited": totals["twins_waited"],
            "tokens saved by twins": totals["twin_tokens_saved"],
            "preemptions": totals["preemptions"],
            "recomputed": totals["recomputed_tokens"],
            "reskipped": totals["reskipped_tokens"],
        }
        return line + "".join(f" | {name} {n}" for name, n in others.items() if n)

    def _count(self, request: TrackedRequest, name: str, number: int) -> None:
        if number:
            self.totals[name] += number
            request.counters[name] += number

    def _figures(self) -> Figures:
        cache, tiers = self._cache, self._cache.tier.figures()
        return {
            **self.totals,
            "requests_finished": dict(self.requests_finished),
            "lost_tokens": dict(self.lost_tokens),
            "accepted_by_position": {str(i): int(n) for i, n in enumerate(self._accepted)},
            "checkpoints_published": dict(cache.checkpoints_published),
            "checkpoints_read": dict(cache.checkpoints_read),
            "checkpoints_skipped": cache.checkpoints_skipped,
            "kv_evictions": cache.kv.evictions,
            "state_evictions": cache.states.evictions,
            **{name: tiers[name] for name in tier.COUNTERS},
        }


def _difference(now: Figures, before: Figures) -> Figures:
    """What was added, without the counts by name that nothing was added to."""
    added: Figures = {}
    for name, value in now.items():
        if isinstance(value, dict):
            earlier = before[name]
            added[name] = {
                k: n - earlier.get(k, 0) for k, n in value.items() if n != earlier.get(k)
            }
        else:
            added[name] = value - before[name]
    return added
