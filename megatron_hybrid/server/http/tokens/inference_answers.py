"""/inference/v1/generate: answers in vLLM's shape."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from megatron_hybrid.request import FinishReason, TokenLogprob
from megatron_hybrid.routed_experts import RoutedExperts
from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.logprobs import finite, without_hurry
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import HANDED_OVER, Chunk
from megatron_hybrid.server.http.tokens.answers import DONE, TokenAnswers, event
from megatron_hybrid.server.http.tokens.inference_body import PreparedInference


class InferenceAnswers(TokenAnswers):
    """Of one prompt. As events: each has the tokens that are new."""

    def __init__(
        self, serving: Serving, prepared: PreparedInference, generation: Generation
    ) -> None:
        """Begins; raises what `Generation.start` raises."""
        super().__init__(serving, prepared.prompts, generation, with_text=False)
        (prompt,) = prepared.prompts
        own = prompt.generation.called
        self._head: Chunk = {"request_id": own or generation.request_id, "output_mode": "tokens"}
        self._ids = prompt.token_ids.tolist() if prepared.with_prompt else None

    def whole(self, answers: list[Delta]) -> Any:
        generation = self._generation
        peer = generation.handover_address
        return {
            **self._head,
            "model": generation.model,
            "created": generation.created,
            "choices": [self._choice(answer) for answer in answers],
            "usage": generation.usage(),
            "prompt_token_ids": self._ids,
            "prompt_logprobs": self._prompt_logprobs(),
            HANDED_OVER: {"peer": peer} if peer else None,
        }

    def events(self, delta: Delta) -> bytes:
        chunk = {**self._head, "choices": [self._choice(delta)], "usage": None}
        if self._ids is not None:  # only in the first one
            chunk["prompt_token_ids"], self._ids = self._ids, None
        if self._wanted.continuous_usage:
            chunk["usage"] = self._generation.usage_so_far(delta.index)
        return event(chunk)

    def last_events(self) -> bytes:
        if not self._wanted.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._generation.usage()}) + DONE

    def _choice(self, delta: Delta) -> Chunk:
        reason, choice = delta.finish_reason, self._choices[delta.index]
        logprobs = None
        if self._wanted.params.logprobs is not None:
            content = [_entry(one) for one in without_hurry(delta.logprobs)]
            logprobs = {"content": content}
        return {
            "index": delta.index,
            "token_ids": delta.token_ids,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason if reason == FinishReason.STOP.value else None,
            "weight_versions": self._weight_versions(delta.index) if reason is not None else None,
            "routed_experts": _routed(delta.routed_experts),
        }

    def _prompt_logprobs(self) -> list[Chunk | None] | None:
        """By token id, the prompt's own first."""
        known = self._generation.prompt_logprobs.get(0)
        if known is None:
            return None
        return [None if one is None else _by_id(one) for one in without_hurry(known)]


def _routed(experts: RoutedExperts | None) -> Chunk | None:
    """As prime-rl's servers and routers have them; vLLM's own answer is a file of numpy's."""
    if experts is None:
        return None
    shown = {"shape": experts.shape, "start": experts.start, "dtype": experts.dtype}
    return {"data": b64encode(experts.data).decode(), **shown}


def _entry(one: TokenLogprob) -> Chunk:
    """With the token itself among the likeliest, as vLLM has it."""
    ranks = {token: rank for rank, (token, _) in enumerate(one.top, start=1)}
    chosen = _token(one.token_id, one.logprob, ranks)
    others = [_token(*likely, ranks) for likely in one.top if likely[0] != one.token_id]
    return {**chosen, "top_logprobs": [chosen, *others]}


def _token(token_id: int, logprob: float, ranks: dict[int, int]) -> Chunk:
    """In vLLM's newer form, and in the older one, which has only `token`."""
    return {
        "token": f"token_id:{token_id}",
        "token_id": token_id,
        "logprob": finite(logprob),
        "rank": ranks.get(token_id),
        "bytes": None,
    }


def _by_id(one: TokenLogprob) -> Chunk:
    ranks: Sequence[int] = [token for token, _ in one.top]
    own = [] if one.token_id in ranks else [(one.token_id, one.logprob)]
    ordered = sorted([*own, *one.top], key=lambda likely: likely[0] != one.token_id)
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": ranks.index(token) + 1 if token in ranks else None,
            "decoded_token": None,
        }
        for token, logprob in ordered
    }
