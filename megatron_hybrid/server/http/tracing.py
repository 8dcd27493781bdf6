"""A trace of every request for answers: what is known of it when all was sent.

Attributes have the names of OpenTelemetry's GenAI conventions, latencies those of vLLM. Never a
prompt, an answer or a stop string; nor the answer's id, which ends it for whoever knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Flask, Response, g, request

from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.link.traces import AnswerTrace, RequestTrace

# By route: GenAI's names of what is done.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
PARENT = ("traceparent", "tracestate")  # W3C's headers


def install(app: Flask, send: Callable[[RequestTrace], None]) -> None:
    """Give `send` the trace of every request for answers, also of one that was refused."""

    @app.after_request
    def trace(response: Response) -> Response:
        route = "" if request.url_rule is None else request.url_rule.rule
        if route in OPERATIONS and request.method == "POST":
            parent = {name: request.headers[name] for name in PARENT if name in request.headers}
            attributes = {
                "http.request.method": request.method,
                "http.route": route,
                "gen_ai.operation.name": OPERATIONS[route],
                "gen_ai.provider.name": "megatron_hybrid",
                "gen_ai.request.id": g.request_id,
            }
            make = partial(_trace, attributes, parent, g.started, g.get("generation"))
            response.call_on_close(lambda: send(make(response.status_code)))
        return response


def _trace(
    attributes: dict[str, Any],
    parent: dict[str, str],
    arrived: float,
    generation: Generation | None,
    status: int,
) -> RequestTrace:
    """Of a request that has just ended. arrived: by `time.monotonic`."""
    seconds = time.monotonic() - arrived
    if generation is None:
        submitted, answers = None, []
    else:
        status = generation.outcome(status)
        submitted, answers = generation.submitted, generation.answers()
        attributes |= _asked(generation) | _used(generation, answers)
        attributes |= _latencies(answers, seconds)
    attributes["http.response.status_code"] = status
    if status >= 400:
        attributes["error.type"] = str(status)
    model = attributes.get("gen_ai.request.model", "")
    return RequestTrace(
        f"{attributes['gen_ai.operation.name']} {model}".rstrip(),
        time.time() - seconds,
        seconds,
        status,
        attributes,
        parent,
        submitted,
        answers,
    )


def _asked(generation: Generation) -> dict[str, Any]:
    """What the request says, with the defaults of what it leaves open."""
    wanted, params = generation.wanted, generation.wanted.params
    asked = {
        "model": wanted.model or generation.model,
        "stream": wanted.stream,
        "choice.count": params.n,
        "max_tokens": None if params.max_tokens is None else int(params.max_tokens),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "seed": params.seed,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
    }
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}


def _used(generation: Generation, answers: list[AnswerTrace]) -> dict[str, Any]:
    """Tokens, and how the answers that came to their end have ended."""
    tokens = generation.tokens()
    reasons = [one.finish_reason for one in answers if one.finish_reason is not None]
    used: dict[str, Any] = {
        "gen_ai.response.model": generation.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.completion,
        "gen_ai.usage.cache_read.input_tokens": tokens.cached,
    }
    if tokens.reasoning is not None:
        used["gen_ai.usage.reasoning.output_tokens"] = tokens.reasoning
    return used


def _latencies(answers: list[AnswerTrace], seconds: float) -> dict[str, float]:
    """In seconds; of several answers the first token of any, and the longest of the rest."""
    begun, first, prefill, decode = [], [], [], []
    for one in answers:
        if one.begun is not None:
            begun.append(one.begun)
        if one.begun is not None and one.first_token is not None:
            first.append(one.first_token)
            prefill.append(one.first_token - one.begun)
            end = seconds if one.ended is None else one.ended
            decode.append(max(0.0, end - one.first_token))
    found = {"e2e": seconds}
    if begun:
        found["time_in_queue"] = max(begun)
    if first:
        found |= {
            "time_to_first_token": min(first),
            "time_in_model_prefill": max(prefill),
            "time_in_model_decode": max(decode),
        }
    return {f"gen_ai.latency.{name}": value for name, value in found.items()}
