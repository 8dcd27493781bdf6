"""Answers that are given, and how likely they are behind a prompt: for the offline LLM and for
HTTP (docs/server.md).

Each answer is a request of its own, prompt and answer as one prompt, of which log-probabilities are
wanted from the answer on: all of them come from one prefill, in which what is cached of the prompt
is skipped but for its last token, whose logits are those of the answer's first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.request import CONTEXT_FLAG, RequestOutput, SamplingParams, TokenLogprob
from megatron_hybrid.request_checks import validate_prompt
from megatron_hybrid.values import wrong


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """How likely an answer is.

    logprobs: of each of `token_ids`, the model's own, before temperature; `total` is their sum.
    top: at each place the likeliest tokens and their log-probabilities, if they were asked for.
    cached_tokens, computed_tokens: of prompt and answer together. error: why there is nothing of
    all this.
    """

    token_ids: list[int]
    logprobs: list[float]
    total: float
    top: list[tuple[tuple[int, float], ...]]
    cached_tokens: int = 0
    computed_tokens: int = 0
    error: str | None = None

    @classmethod
    def of(cls, token_ids: list[int], output: RequestOutput) -> AnswerScore:
        """What came of the request for it."""
        entries = known(output.prompt_logprobs, len(token_ids))
        if entries is None:
            error = output.error or "It was ended before it was computed."
            return cls(token_ids, [], float("nan"), [], error=error)
        logprobs, cached = [entry.logprob for entry in entries], output.cached_tokens
        top = [entry.top for entry in entries]
        computed = len(output.prompt_token_ids) - cached
        return cls(token_ids, logprobs, sum(logprobs), top, cached, computed)


def params_behind(prompt_tokens: int, top_logprobs: int = 0) -> SamplingParams:
    """What a request asks for that is an answer behind a prompt of so many tokens."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=0,
        prompt_logprobs=top_logprobs,
        prompt_logprobs_start=prompt_tokens,
    )


def kept_at(prompt_tokens: int) -> tuple[int, ...]:
    """Where states are wanted for other answers behind the same prompt."""
    return (prompt_tokens - 1,) if prompt_tokens > 1 else ()


def known(entries: Sequence[TokenLogprob | None] | None, length: int) -> list[TokenLogprob] | None:
    """The log-probabilities of an answer of so many tokens; None where they are not all there."""
    found = [entry for entry in entries or () if entry is not None]
    return found if len(found) == length else None


def joined(
    prompt: Sequence[int],
    answer: Sequence[int],
    vocab_size: int,
    limit: int,
    *,
    flag: str = CONTEXT_FLAG,
    prompt_name: str = "prompt",
    answer_name: str = "answer",
) -> list[int]:
    """One behind the other. Raises InvalidRequestError, which calls them by these names, unless
    both have tokens, all known, and together fewer than `limit`, as `flag` says."""
    validate_prompt(prompt, vocab_size, limit, prompt_name, flag=flag)
    validate_prompt(answer, vocab_size, limit, answer_name, flag=flag)
    tokens = len(prompt) + len(answer)
    if tokens >= limit:
        words = (
            f"has {len(answer)} tokens and {prompt_name} {len(prompt)}; together they must have "
        )
        raise wrong(answer_name, f"{words}fewer than {limit} ({flag})", status=413)
    return [*prompt, *answer]
