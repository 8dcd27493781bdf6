"""Replicas behind a router: real schedulers and caches, a clock that steps are charged to.

A step takes `step` plus `token` for each token in it, and each replica has its own. Chats are held
as tools/benchmark_replicas.py holds them: a number of clients, each with its share of the open
chats, whose turns it takes in rotation, one request at a time. So a run depends on its seed alone.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Protocol

import numpy as np

from megatron_hybrid.cache.changes import Change
from megatron_hybrid.cache.checkpoint_placement import CheckpointHints
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.latency import Latencies
from megatron_hybrid.engine.scheduler import Scheduler
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.execution.plan import StepResult
from megatron_hybrid.request import RequestEvent, SamplingParams
from simulation.chat import zipf_weights
from simulation.parameters import MAX_CONTEXT
from simulation.text import GENERATION_PROMPT, Context, Corpus, Tokens

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
# The reference model in 0.1 GB for KV and live states and 0.1 GB for cached states, as in
# tools/benchmark_replicas.py.
REFERENCE = CacheGeometry(
    block_size=64,
    kernel_chunk=64,
    num_blocks=487,
    max_requests=16,
    num_cached_slots=151,
    bytes_per_block=196_608,
    bytes_per_state=701_440,
    bytes_per_logits=8_192,
    stored_as="float32",
)


HELD_UP_SECONDS = 1.0  # other work comes for so long


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a step, in seconds."""

    step: float
    token: float
    noise: float = 0.0  # of the logarithms of steps' lengths: the spread of both
    held_up: float = 0.0  # share of the time in which other work halves a replica's speed


# Each of the two replicas has one core of a CPU; or a GPU with a model of some billion parameters.
COSTS = {
    "cpu": Costs(0.008, 0.0004),
    "gpu": Costs(0.008, 0.00003),
    "busy": Costs(0.008, 0.0004, 0.5, 0.3),  # the CPU beside other work
}


@dataclass(frozen=True, slots=True)
class Chats:
    """requests: in all. systems: different system messages, the k-th is 1/k as frequent as the
    first. documents: texts, as frequent, one of which begins a chat's first message; 0: none does.
    spread: of the logarithms of turns' and answers' lengths and of the numbers of turns; 0:
    all are alike. think: mean seconds between an answer and its client's next request. bursts: all
    who wait ask together, every 2 * think seconds. Other sizes are in tokens."""

    requests: int = 1000
    turns: int = 5
    systems: int = 10
    system_tokens: int = 434
    documents: int = 0
    document_tokens: int = 600
    turn_tokens: int = 84
    answer_tokens: int = 16
    clients: int = 16
    open_chats: int = 128
    spread: float = 0.0
    think: float = 0.0
    bursts: bool = False
    seed: int = 0


@dataclass(eq=False, slots=True)
class Chat:
    """A conversation so far. turns: pairs of a user's message and its answer that are to come."""

    number: int
    context: Context
    turns: deque[tuple[Tokens, Tokens]]
    replica: int | None = None  # that answered last


@dataclass(eq=False, slots=True)
class Ask:
    """One request."""

    name: str
    client: int
    chat: Chat
    prompt: Tokens
    answer: Tokens
    message_ends: tuple[int, ...]
    sent: float
    replica: int = 0
    first_token: float | None = None


class Router(Protocol):
    """Chooses among replicas, and hears what becomes of requests."""

    def place(self, ask: Ask, replicas: Sequence[int]) -> int: ...

    def started(self, ask: Ask) -> None: ...

    def ended(self, ask: Ask, *, is_whole: bool) -> None: ...

    def changed(self, replica: int, changes: list[Change]) -> None: ...

    def lost(self, replica: int) -> None: ...


@dataclass(slots=True)
class RoutingResult:
    """What became of one workload. Seconds are the simulated clock's."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    moved: int = 0  # turns that another replica got than the turn before
    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)  # seconds from being sent
    answers: list[float] = field(default_factory=list)  # seconds until the last token
    by_replica: Counter[int] = field(default_factory=Counter)  # requests
    placing_seconds: float = field(default=0.0, compare=False)  # of the real clock, in all


class SimulatedReplica:
    """The scheduler and the cache of one replica."""

    def __init__(self, geometry: CacheGeometry, max_tokens: int) -> None:
        cache = HybridCache(geometry)
        context = DynamicInferenceContext(
            geometry, max_tokens=max_tokens, max_seq_length=MAX_CONTEXT, cache=cache
        )
        self.changes = cache.take_down_changes()
        self.scheduler = Scheduler(
            context, Statistics(cache, Latencies(geometry.max_requests)), twins=None
        )
        self.asks: dict[str, Ask] = {}
        self.tracked: dict[str, TrackedRequest] = {}
        self._context = context

    def submit(self, ask: Ask) -> None:
        tracked = TrackedRequest(
            request_id=ask.name,
            prompt=ask.prompt,
            params=_PARAMS,
            seed=0,
            max_tokens=len(ask.answer),
            stop_ids=(),
            hints=CheckpointHints(message_ends=ask.message_ends),
        )
        self.asks[ask.name] = ask
        self.tracked[ask.name] = tracked
        self.scheduler.submit([tracked])

    def step(self) -> tuple[int, list[RequestEvent]]:
        """The tokens in the next step, and what it says at its end."""
        plan = self.scheduler.schedule()
        tokens = len(plan.decode_rows) + sum(chunk.length for chunk in plan.prefills)
        generated = self._context.rows.generated
        sampled = [
            self.asks[self._context.running_in(row).request.request_id].answer[generated[row]]
            for row in plan.sampled_rows.tolist()
        ]
        if not plan.is_empty:
            self.scheduler.commit(plan, StepResult(np.asarray(sampled, dtype=np.int64), {}, {}))
        return tokens, self.scheduler.take_events()


class Replicas:
    """One workload on replicas behind a router."""

    def __init__(
        self,
        chats: Chats,
        router: Router,
        replicas: int = 2,
        *,
        geometry: CacheGeometry = REFERENCE,
        costs: Costs = COSTS["cpu"],
        max_tokens: int = 2048,
        kill: bool = False,
    ) -> None:
        self._chats = chats
        self._router = router
        self._costs = costs
        self._kill_at = chats.requests // 2 if kill else None
        self._replicas = {k: SimulatedReplica(geometry, max_tokens) for k in range(replicas)}
        self._alive = list(self._replicas)
        self._random = Random(f"{chats.seed} pauses")
        self._noise = Random(f"{chats.seed} noise")
        self._coming = _conversations(chats)
        self._held: list[deque[Chat]] = [deque() for _ in range(chats.clients)]
        self._events: list[tuple[float, int, int, list[RequestEvent] | None]] = []
        self._pushed = 0
        self._busy: set[int] = set()
        self.result = RoutingResult()

    def run(self) -> RoutingResult:
        """Until no client has anything left to ask."""
        for client in range(self._chats.clients):
            self._push(0.0, client, None)
        while self._events:
            now, _, number, events = heapq.heappop(self._events)
            if events is None:
                self._ask(now, number)
            elif number in self._replicas:
                self._step_ended(now, number, events)
            self.result.seconds = now
            if self._kill_at is not None and len(self.result.answers) >= self._kill_at:
                self._kill(now, max(self._replicas))
        return self.result

    def _push(self, time: float, number: int, events: list[RequestEvent] | None) -> None:
        """events: of the step of replica `number`, or None: client `number` asks."""
        heapq.heappush(self._events, (time, self._pushed, number, events))
        self._pushed += 1

    def _ask(self, now: float, client: int) -> None:
        chats, held = self._chats, self._held[client]
        most, more = divmod(chats.open_chats, chats.clients)
        while len(held) < most + (client < more) and (chat := next(self._coming, None)):
            held.append(chat)
        if not held or self.result.requests == chats.requests:
            return
        chat = held.popleft()
        message, answer = chat.turns.popleft()
        chat.context = chat.context.message(message)
        prompt = np.concatenate((*chat.context.parts, GENERATION_PROMPT))
        name = f"r{self.result.requests}"
        ask = Ask(name, client, chat, prompt, answer, chat.context.ends, now)
        self.result.requests += 1
        ask.replica = self._place(ask)
        self.result.by_replica[ask.replica] += 1
        self.result.moved += chat.replica not in (None, ask.replica)
        chat.replica = ask.replica
        self._replicas[ask.replica].submit(ask)
        self._step(now, ask.replica)

    def _place(self, ask: Ask) -> int:
        started = perf_counter()
        replica = self._router.place(ask, self._alive)
        self.result.placing_seconds += perf_counter() - started
        return replica

    def _step(self, now: float, number: int) -> None:
        """Begin one, if the replica is idle and has work."""
        replica = self._replicas[number]
        if number in self._busy or not replica.scheduler.has_work:
            return
        self._busy.add(number)
        tokens, events = replica.step()
        self._router.changed(number, replica.changes.take())
        self._push(now + self._seconds(now, number, tokens), number, events)

    def _seconds(self, now: float, number: int, tokens: int) -> float:
        costs = self._costs
        seconds = costs.step + tokens * costs.token
        if costs.noise:
            seconds *= self._noise.lognormvariate(0.0, costs.noise)
        if costs.held_up:
            period = Random(f"{self._chats.seed} {number} {int(now / HELD_UP_SECONDS)}")
            seconds *= 1 + (period.random() < costs.held_up)
        return seconds

    def _step_ended(self, now: float, number: int, events: list[RequestEvent]) -> None:
        self._busy.discard(number)
        replica = self._replicas[number]
        for event in events:
            ask = replica.asks[event.request_id]
            if ask.first_token is None:
                ask.first_token = now
                self._router.started(ask)
            if event.finish_reason is not None:
                self._answered(now, replica, ask)
        self._step(now, number)

    def _answered(self, now: float, replica: SimulatedReplica, ask: Ask) -> None:
        result = self.result
        del replica.asks[ask.name]
        assert ask.first_token is not None
        result.prompt_tokens += len(ask.prompt)
        result.skipped_tokens += replica.tracked.pop(ask.name).cached_tokens
        result.first_tokens.append(ask.first_token - ask.sent)
        result.answers.append(now - ask.sent)
        self._router.ended(ask, is_whole=True)
        ask.chat.context = ask.chat.context.answered(ask.answer)
        if ask.chat.turns:
            self._held[ask.client].append(ask.chat)
        self._push(now + self._pause(now), ask.client, None)

    def _pause(self, now: float) -> float:
        chats = self._chats
        if not chats.think:
            return 0.0
        if chats.bursts:
            return 2 * chats.think - now % (2 * chats.think)
        return self._random.expovariate(1 / chats.think)

    def _kill(self, now: float, number: int) -> None:
        """The replica is gone; what it had fails, and those chats are not continued."""
        self._kill_at = None
        killed = self._replicas.pop(number)
        self._alive.remove(number)
        self._router.lost(number)
        for ask in killed.asks.values():
            self.result.failed += 1
            self._router.ended(ask, is_whole=False)
            self._push(now, ask.client, None)


def _conversations(chats: Chats) -> Iterator[Chat]:
    rng, corpus = Random(chats.seed), Corpus(chats.seed)
    systems = [corpus.text(rng, chats.system_tokens) for _ in range(chats.systems)]
    weights = zipf_weights(chats.systems, 1.0)
    documents = [corpus.text(rng, chats.document_tokens) for _ in range(chats.documents)]
    document_weights = zipf_weights(chats.documents, 1.0)

    def size(mean: int) -> int:
        """Log-normal."""
        normal = rng.gauss(0.0, chats.spread) if chats.spread else 0.0
        return max(1, round(mean * np.exp(normal - chats.spread**2 / 2)))

    for number in range(-(-chats.requests // chats.turns)):
        (system,) = rng.choices(systems, cum_weights=weights)
        about = rng.choices(documents, cum_weights=document_weights) if documents else []
        turns: deque[tuple[Tokens, Tokens]] = deque()
        for turn in range(size(chats.turns)):
            text = corpus.text(rng, size(chats.turn_tokens))
            message = np.concatenate((*(() if turn else about), corpus.unique(number), text))
            turns.append((message, corpus.text(rng, size(chats.answer_tokens))))
        yield Chat(number, Context().message(system), turns)
