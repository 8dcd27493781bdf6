"""The body of /score_tokens, and what it asks for."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.generation_request import MAX_ANSWERS, GenerationRequest
from megatron_hybrid.server.http.protocol.parsing import BY_DEFAULT, Body, read
from megatron_hybrid.server.http.protocol.requests import (
    MAX_TIMEOUT,
    Filled,
    FilledIds,
    Logprobs,
)
from megatron_hybrid.server.http.protocol.tools import Name
from megatron_hybrid.server.options import ParseOptions

# Of all answers together, each with the prompt before it: a short body could ask for very many.
MAX_SCORED_TOKENS = 2**24


class ScoreTokensRequest(Body):
    """Of /score_tokens.

    model: The model's name; left out: the one that is served.
    prompt: Text or token ids that every answer stands behind.
    answers: Texts, which get no special tokens, or lists of token ids.
    top_logprobs: Give this many of the likeliest tokens at each place, too.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    priority: A smaller number runs first.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too.
    """

    prompt: Filled | FilledIds
    answers: Annotated[list[Filled | FilledIds], Meta(min_length=1, max_length=MAX_ANSWERS)]
    model: Name | None = None
    top_logprobs: Logprobs | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A request of /score_tokens; its sampling is not known before its tokens are."""

    prompt: str | list[int]
    answers: Sequence[str | list[int]]
    top_logprobs: int | None
    generation: GenerationRequest


def parse_score(values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> Score:
    """Of a body's JSON. Raises InvalidRequestError naming the first field that is wrong."""
    body = read(ScoreTokensRequest, values, options)
    generation = GenerationRequest(
        model=body.model or None,
        params=SamplingParams(max_tokens=0),
        max_tokens_field="max_tokens",
        stream=False,
        include_usage=False,
        continuous_usage=False,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        cache_checkpoints=(),
        timeout=body.timeout,
    )
    return Score(body.prompt, body.answers, body.top_logprobs, generation)


def check_size(prompt_tokens: int, answers: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequestError for more tokens than one request may have scored."""
    tokens = prompt_tokens * len(answers) + sum(map(len, answers))
    if tokens > MAX_SCORED_TOKENS:
        raise InvalidRequestError(
            "answers",
            f"answers has {len(answers)} entries behind a prompt of {prompt_tokens} tokens, "
            f"{tokens} tokens in all; the limit is {MAX_SCORED_TOKENS}. Send fewer at once.",
            status=413,
        )
