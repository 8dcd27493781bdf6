"""Runs a workload on an engine in this process and notes when its tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bench.measurements import Arrival, RequestRecord
from bench.workloads import Conversations, Round, Workload
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams


class Engine(Protocol):
    """What the driver needs of an engine; DynamicInferenceEngine has it."""

    def add_request(
        self, request_id: str, prompt_token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> object: ...

    def step(self) -> list[RequestEvent]: ...

    def has_work(self) -> bool: ...


class BenchmarkError(RuntimeError):
    """The engine did not do what the workload asked for, so its figures mean nothing."""


@dataclass(slots=True)
class Run:
    records: list[RequestRecord] = field(default_factory=list)
    round_walls: list[float] = field(default_factory=list)  # seconds
    cpu_seconds: float = 0.0  # of this process, all threads, in the rounds

    @property
    def wall(self) -> float:
        return sum(self.round_walls)


def run_workload(
    engine: Engine, workload: Workload, on_finish: Callable[[], object] | None = None
) -> Run:
    """Run every round of the workload; `on_finish` is called once for every finished request.

    Raises BenchmarkError when a request fails or does not give exactly the tokens asked for.
    """
    conversations = Conversations()
    run = Run()
    for number, round_ in enumerate(workload.rounds):
        _run_round(engine, number, round_, conversations, run, on_finish)
    return run


def _run_round(
    engine: Engine,
    number: int,
    round_: Round,
    conversations: Conversations,
    run: Run,
    on_finish: Callable[[], object] | None,
) -> None:
    # Prompts, arrays as a server's engine gets them, and parameters are made before the clock
    # starts: that is not the engine's work.
    prompts = {
        request.request_id: np.array(conversations.prompt(request), dtype=np.int32)
        for request in round_
    }
    params = {
        request.request_id: SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
        )
        for request in round_
    }
    generated: dict[str, list[int]] = {request.request_id: [] for request in round_}
    unfinished = set(prompts)

    cpu_before = time.process_time()
    submitted = time.perf_counter()
    records = {
        request_id: RequestRecord(request_id, number, len(prompt), submitted)
        for request_id, prompt in prompts.items()
    }
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params[request_id])
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.token_ids:
                generated[event.request_id] += event.token_ids
                records[event.request_id].arrivals.append(Arrival(now, len(event.token_ids)))
            if event.finish_reason is not None:
                if event.finish_reason is not FinishReason.LENGTH:
                    raise BenchmarkError(
                        f"Request {event.request_id} ended with {event.finish_reason.value!r}"
                        f" instead of giving all its tokens: {event.error or 'no reason given'}"
                    )
                records[event.request_id].cached_tokens = event.cached_tokens
                unfinished.discard(event.request_id)
                if on_finish is not None:
                    on_finish()
    run.round_walls.append(time.perf_counter() - submitted)
    run.cpu_seconds += time.process_time() - cpu_before

    if unfinished:
        raise BenchmarkError(f"The engine is idle, but never finished {sorted(unfinished)[:5]}.")
    for request in round_:
        tokens = generated[request.request_id]
        if len(tokens) != request.max_tokens:
            raise BenchmarkError(
                f"Request {request.request_id} gave {len(tokens)} tokens"
                f" instead of {request.max_tokens}."
            )
        conversations.append(request, tokens)
    run.records += records.values()
