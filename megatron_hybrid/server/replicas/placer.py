"""Decides which replica takes a request. Pure Python: no clock, no socket.

longest_prefix estimates for each replica how much later all answers together would be done with
the request there than without it, in the time that one token takes to compute, and takes the least:

    cost = tokens of prompts that wait to be computed there, less what they skip
         + (1 + answers that run there) * this request's own tokens, less what it skips there
         + 2 * answers that run there * the steps that they share with its own answer

The request waits for the first part, and for the second once; every answer that runs waits for the
second, too, since its next token comes with or behind this prompt. In a step that two answers share
each one waits for the other's token. Lengths of answers are taken to be exponentially distributed:
two with means a and b share a*b / (a + b) steps, whenever they began. docs/routing.md says why
there is no weight to set, and what other routers do.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_hybrid.kv_events import CacheContents
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.replicas.rendezvous import bounded_place, key_of
from megatron_hybrid.server.replicas.replica import PromptKeys, Replica

Prompts = Sequence[PromptKeys]  # of one request
RECENT_ANSWERS = 100  # whose mean length stands for the next one's


@dataclass(slots=True)
class _Placed:
    """An HTTP request that has a place and has not ended."""

    replica: int
    answers: int
    n: int = 0  # to each prompt
    waiting: dict[str, tuple[int, PromptKeys]] = field(default_factory=dict)
    # ^ prompts without their first token, by engine request: tokens to compute


class Placer:
    """One decision after another, and the load that follows from them.

    sizes: of each replica's cache. max_queue: answers that may wait on one before it refuses more.
    """

    def __init__(self, policy: str, sizes: CacheSizes, max_queue: int = 1_000_000) -> None:
        self.sizes = sizes
        self.replicas: defaultdict[int, Replica] = defaultdict(lambda: Replica(sizes))
        self._max_queue = max_queue
        self._choose: Callable[[Prompts, int | None, Sequence[int]], int] = {
            "longest_prefix": self._longest_prefix,
            "first_prefix_block": self._first_prefix_block,
            "bounded_rendezvous": self._bounded_rendezvous,
            "load_balanced": self._load_balanced,
        }[policy]
        self._placed: dict[str, _Placed] = {}
        self._ended = 0
        self._mean_answer = 1.0

    def place(
        self,
        request_id: str,
        prompts: Prompts,
        n: int,
        max_tokens: int | None,
        replicas: Sequence[int],
    ) -> int:
        """One of these replicas, at least one, for the HTTP request, which counts there from now
        on. A request that has a place gives it up."""
        self.end(request_id)
        answers = len(prompts) * n
        # One that would refuse it is no place while another one has room.
        room = [
            one
            for one in replicas
            if not (waiting := self.replicas[one].waiting) or waiting + answers <= self._max_queue
        ]
        number = self._choose(prompts, max_tokens, room or replicas)
        placed = self._put(request_id, number, answers)
        placed.n = n
        replica = self.replicas[number]
        replica.waiting += answers
        for index, prompt in enumerate(prompts):
            tokens = prompt.length - replica.reusable(prompt)
            replica.expect(prompt)
            placed.waiting[f"{request_id}-{index}"] = tokens, prompt
            replica.prefill += tokens
            replica.total += prompt.length
        return number

    def move(self, request_id: str, replica: int, answers: int) -> None:
        """The request went there by itself; its prompts are not known if it had no place."""
        known = self._placed.get(request_id)
        if known is not None and known.replica == replica:
            return
        self.end(request_id)
        self._put(request_id, replica, answers)

    def start(self, engine_request_id: str) -> None:
        """A prompt is computed, and its answer has begun."""
        placed = self._placed.get(engine_request_id.rpartition("-")[0])
        if placed is not None:
            self._stop_waiting(placed, engine_request_id)

    def end(self, request_id: str, tokens: int | None = None) -> None:
        """An HTTP request is over. tokens: of its answers together, if they came to their end."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        for name in list(placed.waiting):
            self._stop_waiting(placed, name)
        self.replicas[placed.replica].answers -= placed.answers
        if tokens is not None:
            self._ended = min(self._ended + 1, RECENT_ANSWERS)
            change = tokens / placed.answers - self._mean_answer
            self._mean_answer += change / self._ended

    def lose(self, replica: int) -> None:
        """It is gone, with all that it had."""
        for name in [name for name, one in self._placed.items() if one.replica == replica]:
            self.end(name)
        self.replicas[replica].contents = CacheContents()
        self.replicas[replica].adapters = {}

    def _put(self, request_id: str, replica: int, answers: int) -> _Placed:
        placed = self._placed[request_id] = _Placed(replica, answers)
        self.replicas[replica].answers += answers
        return placed

    def _stop_waiting(self, placed: _Placed, engine_request_id: str) -> None:
        waiting = placed.waiting.pop(engine_request_id, None)
        if waiting is not None:
            tokens, prompt = waiting
            replica = self.replicas[placed.replica]
            replica.prefill -= tokens
            replica.waiting -= placed.n
            replica.expect_no_more(prompt)

    def delay(self, number: int, prompts: Prompts, max_tokens: int | None) -> float:
        """By how much later all answers together would be done with the request on that replica,
        in tokens."""
        replica = self.replicas[number]
        own = sum(prompt.length - replica.reusable(prompt) for prompt in prompts)
        return self._work(number, max_tokens) + (1 + replica.answers) * own

    def _longest_prefix(self, prompts: Prompts, most: int | None, replicas: Sequence[int]) -> int:
        return min(replicas, key=lambda one: (self.delay(one, prompts, most), *self._filling(one)))

    def _load_balanced(self, prompts: Prompts, most: int | None, replicas: Sequence[int]) -> int:
        return min(replicas, key=lambda one: (self._work(one, most), *self._filling(one)))

    def _first_prefix_block(
        self, prompts: Prompts, most: int | None, replicas: Sequence[int]
    ) -> int:
        """Rendezvous hashing: when a replica goes or comes back, only its own prompts move."""
        if not prompts[0].blocks():
            return self._load_balanced(prompts, most, replicas)
        block = prompts[0].blocks()[0].to_bytes(8, "little")
        return min(
            replicas,
            key=lambda one: hashlib.blake2b(block + one.to_bytes(4, "little")).digest(),
        )

    def _bounded_rendezvous(
        self, prompts: Prompts, most: int | None, replicas: Sequence[int]
    ) -> int:
        """By the first block and what runs alone; no replica gets much more than its share."""
        key = key_of(prompts[0].blocks())
        if not key:
            return self._load_balanced(prompts, most, replicas)
        return bounded_place(key, {one: self.replicas[one].answers for one in replicas})

    def _work(self, replica: int, max_tokens: int | None) -> float:
        """By how much a request without a prompt would delay others, and they it, in tokens."""
        mean = self._mean_answer
        own = mean if max_tokens is None else min(mean, max_tokens)
        together = mean * own / (mean + own) if own else 0.0
        return self.replicas[replica].prefill + 2 * self.replicas[replica].answers * together

    def _filling(self, replica: int) -> tuple[int, int, int]:
        """Orders replicas that would be as fast: whose cache has more room."""
        return len(self.replicas[replica].contents.blocks), self.replicas[replica].total, replica
