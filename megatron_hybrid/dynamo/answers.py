"""Answers as Dynamo's front end takes them: a dict for each event of the engine."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.dynamo.requests import PEER
from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "error",
}


class Answer:
    """The answer to one request. handover_address: of a worker that only computes prompts."""

    def __init__(self, handover_address: str = "") -> None:
        self.has_ended = False
        self._handover_address = handover_address
        self._tokens = 0
        self._engine_data: dict[str, Any] | None = None

    def chunk(self, event: RequestEvent) -> dict[str, Any]:
        """What an event adds to it; with its end comes the usage."""
        self._tokens += len(event.token_ids)
        chunk: dict[str, Any] = {"token_ids": event.token_ids, "index": event.index}
        if event.logprobs is not None:
            entries = event.token_logprobs()
            chunk["log_probs"] = [one.logprob for one in entries]
            if any(one.top for one in entries):
                chunk["top_logprobs"] = list(map(_most_likely, entries))
        if event.prompt_logprobs is not None:
            self._engine_data = {"prompt_logprobs": list(map(_position, event.prompt_logprobs))}
        if event.finish_reason is not None:
            self.has_ended = True
            chunk["finish_reason"] = _REASONS[event.finish_reason]
            chunk["completion_usage"] = {
                "prompt_tokens": event.prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": event.prompt_tokens + self._tokens,
                "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
            }
            if self._handover_address:
                chunk["disaggregated_params"] = {PEER: self._handover_address}
            if self._engine_data is not None:
                chunk["engine_data"] = self._engine_data
        return chunk


def _most_likely(one: TokenLogprob) -> list[dict[str, Any]]:
    """The front end makes text of ids."""
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
        for rank, (token, logprob) in enumerate(one.top, 1)
    ]


def _position(one: TokenLogprob | None) -> dict[str, dict[str, Any]] | None:
    """Of a prompt's token: log-probabilities by token id; None for the first one."""
    if one is None:
        return None
    found: dict[str, dict[str, Any]] = {
        str(token): {"logprob": logprob, "rank": rank}
        for rank, (token, logprob) in enumerate(one.top, 1)
    }
    found.setdefault(str(one.token_id), {"logprob": one.logprob})
    return found
