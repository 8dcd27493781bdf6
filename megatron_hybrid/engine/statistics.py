"""Counters of one engine: what was computed, what was skipped, and why it was not more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.cache.hybrid_cache import HybridCache


@dataclass(slots=True)
class StepStatistics:
    """One step's figures."""

    step: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0  # computed
    skipped_tokens: int = 0  # of requests admitted in this step
    admitted: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Statistics:
    """Cumulative figures; computed + skipped = prompt tokens, once all prefills are done."""

    steps: int = 0
    requests_admitted: int = 0
    requests_finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    prompt_tokens: int = 0  # of admitted requests
    computed_tokens: int = 0  # prompt tokens computed
    skipped_tokens: int = 0  # prompt tokens that came from the cache
    matched_tokens: int = 0  # prompt tokens whose KV was in the cache
    generated_tokens: int = 0
    lost_tokens: Counter[str] = field(default_factory=Counter)  # matched, computed again; by cause
    last_step: StepStatistics = field(default_factory=StepStatistics)

    def as_dict(self, cache: HybridCache) -> dict[str, Any]:
        """Everything a user may want to know, as plain numbers."""
        last = self.last_step
        return {
            "steps": self.steps,
            "requests_admitted": self.requests_admitted,
            "requests_finished": dict(self.requests_finished),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "skipped_tokens": self.skipped_tokens,
            "matched_tokens": self.matched_tokens,
            "generated_tokens": self.generated_tokens,
            "lost_tokens": dict(self.lost_tokens),
            "checkpoints_published": dict(cache.checkpoints_published),
            "checkpoints_read": dict(cache.checkpoints_read),
            "checkpoints_skipped": cache.checkpoints_skipped,
            "kv_evictions": cache.kv.evictions,
            "state_evictions": cache.states.evictions,
            **cache.occupancy()._asdict(),
            "last_step": {
                "step": last.step,
                "decode_tokens": last.decode_tokens,
                "prefill_tokens": last.prefill_tokens,
                "skipped_tokens": last.skipped_tokens,
                "admitted": last.admitted,
            },
        }

    def log_line(self, cache: HybridCache) -> str:
        """The periodic log, in Megatron's words."""
        prompt = self.computed_tokens + self.skipped_tokens
        share = 100.0 * self.skipped_tokens / prompt if prompt else 0.0
        use = cache.occupancy()
        last = self.last_step
        return (
            f"step {self.steps}: {last.running} running, {last.waiting} waiting | "
            f"prefill (cumul): computed {self.computed_tokens}, skipped {self.skipped_tokens} "
            f"({share:.1f}% skipped) | "
            f"prefix cache util: KV {use.kv_cached}/{use.kv_blocks} blocks cached "
            f"({use.kv_evictable} evictable), mamba {use.state_cached}/{use.state_slots} slots"
        )
