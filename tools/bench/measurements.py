"""From what each request did to the figures that are compared.

Every engine is measured by these definitions:

wall_s          sum of the rounds' wall times
ttft_s          from the moment the request's round was submitted to its first token
itl_ms          gaps before each token after a request's first arrival, all requests together;
                k tokens that arrive together count as k gaps of a k-th each
prompt_tok_s    prompt tokens, also those found in the cache, by wall_s: the speed of prefill where
                nothing is cached and answers are of one token
steady_itl_ms   those gaps that began after the last first token of their round: decoding with
                no prefill in the way
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Figures = dict[str, Any]  # keys as summarize gives them


class Arrival(NamedTuple):
    when: float  # seconds
    tokens: int


class Gap(NamedTuple):
    began: float
    seconds: float  # before each of the tokens
    tokens: int


@dataclass(slots=True)
class RequestRecord:
    """What one request did; all times are seconds on one clock."""

    request_id: str
    round: int
    prompt_tokens: int
    submitted: float
    cached_tokens: int = 0
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first_token(self) -> float:
        if not self.arrivals:
            raise ValueError(f"Request {self.request_id} ended without a token.")
        return self.arrivals[0].when

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.submitted

    def gaps(self) -> Iterator[Gap]:
        for before, after in pairwise(self.arrivals):
            yield Gap(before.when, (after.when - before.when) / after.tokens, after.tokens)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95th percentile; empty for no values."""
    if not values:
        return {}
    p50, p95 = np.percentile(values, (50, 95))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95)}


def summarize(records: Sequence[RequestRecord], round_walls: Sequence[float]) -> Figures:
    """The figures of one run: `records` of every request, wall seconds of every round."""
    rounds = [[r for r in records if r.round == i] for i in range(len(round_walls))]
    last_first_token = [max((r.first_token for r in rs), default=0.0) for rs in rounds]
    gaps: list[float] = []
    steady_gaps: list[float] = []
    for record in records:
        for gap in record.gaps():
            milliseconds = [1e3 * gap.seconds] * gap.tokens
            gaps += milliseconds
            if gap.began >= last_first_token[record.round]:
                steady_gaps += milliseconds

    wall = sum(round_walls)
    prompt_tokens = sum(r.prompt_tokens for r in records)
    cached_tokens = sum(r.cached_tokens for r in records)
    output_tokens = sum(r.output_tokens for r in records)
    return {
        "wall_s": wall,
        "requests": len(records),
        "prompt_tokens": prompt_tokens,
        "computed_tokens": prompt_tokens - cached_tokens,
        "cached_tokens": cached_tokens,
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "output_tokens": output_tokens,
        "output_tok_s": output_tokens / wall if wall else 0.0,
        "prompt_tok_s": prompt_tokens / wall if wall else 0.0,
        "ttft_s": distribution([r.time_to_first_token for r in records]),
        "itl_ms": distribution(gaps),
        "steady_itl_ms": distribution(steady_gaps),
        "rounds": [
            {
                "wall_s": round_wall,
                "requests": len(rs),
                "prompt_tokens": sum(r.prompt_tokens for r in rs),
                "cached_tokens": sum(r.cached_tokens for r in rs),
                "ttft_s": distribution([r.time_to_first_token for r in rs]),
            }
            for round_wall, rs in zip(round_walls, rounds, strict=True)
        ],
    }
