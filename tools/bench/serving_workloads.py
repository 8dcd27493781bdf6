"""The offline benchmark's workloads, sent to a server: see `workloads.py` for what they are.

The rounds are kept: a round's requests go out at once, and the next round begins when the last is
done. Later rounds continue the answers, so their token ids are needed. Servers with vLLM's field
`return_token_ids` give them; else the text of an answer is turned back into tokens, by the
server's /tokenize or by a tokenizer here, which may give other ids than were generated (and so
fewer cached tokens than the same workload gets offline).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.measurements import Arrival, RequestRecord, summarize
from bench.serving_http import HttpError
from bench.serving_load import send_at
from bench.serving_requests import OpenAIServer, Outcome, ServingRequest
from bench.serving_tokens import TokenSource
from bench.workloads import Conversations, Workload, WorkloadRequest

_FIELDS = {"temperature": 0.0, "ignore_eos": True}


@dataclass(slots=True)
class WorkloadRun:
    """`outcomes` has one list a round; seconds in `round_walls`."""

    outcomes: list[list[Outcome]] = field(default_factory=list)
    round_walls: list[float] = field(default_factory=list)
    answers_from: str = ""  # where the answers' token ids came from

    @property
    def all_outcomes(self) -> list[Outcome]:
        return [outcome for round_ in self.outcomes for outcome in round_]


class AnswerTokens:
    """Finds the token ids of answers, in the way that the server allows."""

    def __init__(self, server: OpenAIServer, tokens: TokenSource) -> None:
        self._server = server
        self._tokens = tokens
        self.source = ""  # "return_token_ids", "/tokenize" or "--tokenizer"

    async def find_source(self) -> dict[str, Any]:
        """Ask the server once; returns the fields that requests need.

        Raises HttpError when there is no way to learn the ids.
        """
        fields = {**_FIELDS, "return_token_ids": True}
        probe = await self._server.send(ServingRequest("probe", [20, 21, 22, 23], 2, fields))
        if probe.failure is None and probe.token_ids:
            self.source = "return_token_ids"
            return fields
        for self.source in ("/tokenize", "--tokenizer"):
            if await self._tokenize("some text") is not None:
                return dict(_FIELDS)
        raise HttpError(
            "The next turn of a conversation needs the answer's token ids, and this server has "
            "neither return_token_ids nor /tokenize: give --tokenizer FOLDER."
        )

    async def of(self, outcome: Outcome) -> list[int]:
        """Raises HttpError when the server fails to say."""
        if self.source == "return_token_ids":
            return outcome.token_ids
        ids = await self._tokenize(outcome.text)
        if ids is None:
            raise HttpError(f"The answer to {outcome.request_id} could not be tokenized.")
        return ids

    async def _tokenize(self, text: str) -> list[int] | None:
        if self.source == "--tokenizer":
            return self._tokens.encode(text)
        if not text:
            return []
        value = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._server.post_json("/tokenize", value)
            return [int(token) for token in answer["tokens"]]
        except (HttpError, OSError, KeyError, TypeError, ValueError):
            return None


async def run_serving_workload(
    server: OpenAIServer,
    workload: Workload,
    tokens: TokenSource,
    on_finish: Callable[[Outcome], object] = lambda outcome: None,
    max_concurrency: int | None = None,
) -> WorkloadRun:
    """Run every round. A request that fails ends the run after its round: later prompts would be
    others than planned. Raises HttpError when answers can't be continued."""
    answers = AnswerTokens(server, tokens)
    continued = len({r.conversation for r in workload.requests()}) < sum(
        len(round_) for round_ in workload.rounds
    )
    fields: dict[str, Any] = await answers.find_source() if continued else dict(_FIELDS)
    conversations = Conversations()
    run = WorkloadRun(answers_from=answers.source)
    for round_ in workload.rounds:
        requests = [
            ServingRequest(r.request_id, conversations.prompt(r), r.max_tokens, fields)
            for r in round_
        ]
        outcomes, wall = await send_at(
            server, requests, [0.0] * len(requests), max_concurrency, on_finish
        )
        for request, outcome in zip(round_, outcomes, strict=True):
            _check_length(request, outcome)
        run.outcomes.append(outcomes)
        run.round_walls.append(wall)
        if any(outcome.failure is not None for outcome in outcomes):
            break
        if continued:
            for request, outcome in zip(round_, outcomes, strict=True):
                conversations.append(request, await answers.of(outcome))
    return run


def summarize_workload(run: WorkloadRun) -> dict[str, Any]:
    """The figures of tools/benchmark_offline.py, from what the server said and when.

    Where the server gives no token ids, an event counts as one token in `itl_ms`.
    """
    records = []
    for number, outcomes in enumerate(run.outcomes):
        started = min(outcome.due for outcome in outcomes)
        for outcome in outcomes:
            if outcome.failure is None:
                records.append(
                    RequestRecord(
                        outcome.request_id,
                        number,
                        outcome.prompt_tokens,
                        started,
                        outcome.cached_tokens or 0,
                        [Arrival(*arrival) for arrival in outcome.arrivals],
                    )
                )
    figures = summarize(records, run.round_walls)
    output = sum(o.output_tokens for o in run.all_outcomes if o.failure is None)
    figures["output_tokens"] = output
    figures["output_tok_s"] = output / figures["wall_s"] if figures["wall_s"] else 0.0
    return {**figures, "answer_token_ids_from": run.answers_from or None}


def _check_length(request: WorkloadRequest, outcome: Outcome) -> None:
    if outcome.failure is None and outcome.output_tokens != request.max_tokens:
        outcome.fail(
            "wrong length",
            f"{outcome.output_tokens} tokens came where {request.max_tokens} were asked for",
        )
