"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hybrid.detokenizer import bytes_of_token
from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of /v1/chat/completions: a list of tokens with their bytes."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int
) -> dict[str, Any]:
    """The shape of /v1/completions: parallel lists. `offset` is where their text begins."""
    tokens = [_spelling(bytes_of_token(tokenizer, entry.token_id)) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {
                _spelling(bytes_of_token(tokenizer, token_id)): _finite(logprob)
                for token_id, logprob in entry.top
            }
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = bytes_of_token(tokenizer, token_id)
    return {"token": _spelling(data), "bytes": list(data), "logprob": _finite(logprob)}


def _spelling(data: bytes) -> str:
    """The token's text, or its bytes spelled out when they are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
