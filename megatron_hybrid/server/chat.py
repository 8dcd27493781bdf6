"""/v1/chat/completions: messages to token ids, and answers in OpenAI's chat shape."""

from __future__ import annotations

from typing import Any

from flask import Response

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.generation import Delta, Generation
from megatron_hybrid.server.http_errors import json_response
from megatron_hybrid.server.logprobs import chat_logprobs
from megatron_hybrid.server.openai_protocol import ChatRequest
from megatron_hybrid.server.serving import Serving
from megatron_hybrid.server.streaming import Answer, Chunk, collect, stream


def answer_chat(serving: Serving, request: ChatRequest, generation: Generation) -> Response:
    """Run one chat request; raises what `Generation` and the tokenizer raise."""
    wanted = request.generation
    prompt, message_ends = serving.tokenizer.encode_chat_with_ends(
        request.messages, request.template_arguments
    )
    serving.check_prompt("messages", prompt, wanted)
    serving.check_cache_checkpoints("messages", prompt, wanted)
    generation.start([prompt], message_ends)
    with_logprobs = wanted.params.logprobs is not None
    head: Chunk = {
        "id": generation.request_id,
        "object": "chat.completion.chunk" if wanted.stream else "chat.completion",
        "created": generation.created,
        "model": serving.options.model_name,
    }

    def logprobs(entries: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(serving.tokenizer, entries) if with_logprobs else None

    if wanted.stream:
        chunks = _ChatChunks(logprobs)
        return stream(generation, head, chunks, include_usage=wanted.include_usage)
    answers = collect(generation, wanted.params.n)
    choices = [_choice(index, answer, logprobs) for index, answer in enumerate(answers)]
    return json_response({**head, "choices": choices, "usage": generation.usage()})


def _choice(index: int, answer: Answer, logprobs: Any) -> Chunk:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason,
    }


class _ChatChunks:
    """A chunk with the role before a choice's first text, and one with the reason at its end."""

    def __init__(self, logprobs: Any) -> None:
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def __call__(self, delta: Delta) -> list[Chunk]:
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(_chunk(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            chunk = _chunk(delta.index, {"content": delta.text})
            chunks.append({**chunk, "logprobs": self._logprobs(delta.logprobs)})
        if delta.finish_reason is not None:
            chunks.append({**_chunk(delta.index, {}), "finish_reason": delta.finish_reason})
        return chunks


def _chunk(index: int, delta: dict[str, Any]) -> Chunk:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
