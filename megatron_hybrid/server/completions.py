"""/v1/completions: text or token ids in, text out, in OpenAI's older shape."""

from __future__ import annotations

from typing import Any

from flask import Response

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.generation import Delta, Generation
from megatron_hybrid.server.http_errors import json_response
from megatron_hybrid.server.logprobs import completion_logprobs
from megatron_hybrid.server.openai_protocol import CompletionRequest
from megatron_hybrid.server.serving import Serving
from megatron_hybrid.server.streaming import Chunk, collect, stream


def answer_completion(
    serving: Serving, request: CompletionRequest, generation: Generation
) -> Response:
    """Run one completion request; raises what `Generation` raises."""
    wanted = request.generation
    prompts = [
        serving.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    for number, prompt in enumerate(prompts):
        serving.check_prompt("prompt", prompt, wanted)
        name = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
        serving.check_cache_checkpoints(name, prompt, wanted)
    generation.start(prompts)
    with_logprobs = wanted.params.logprobs is not None
    head: Chunk = {
        "id": generation.request_id,
        "object": "text_completion",
        "created": generation.created,
        "model": serving.options.model_name,
    }

    def choice(
        index: int, text: str, entries: list[TokenLogprob], reason: str | None, offset: int
    ) -> Chunk:
        logprobs: dict[str, Any] | None = None
        if with_logprobs:
            logprobs = completion_logprobs(serving.tokenizer, entries, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    if wanted.stream:
        offsets: dict[int, int] = {}

        def chunks(delta: Delta) -> list[Chunk]:
            offset = offsets.get(delta.index, 0)
            offsets[delta.index] = offset + len(delta.text)
            return [choice(delta.index, delta.text, delta.logprobs, delta.finish_reason, offset)]

        return stream(generation, head, chunks, include_usage=wanted.include_usage)
    answers = collect(generation, len(prompts) * wanted.params.n)
    choices = [
        choice(index, answer.text, answer.logprobs, answer.finish_reason, 0)
        for index, answer in enumerate(answers)
    ]
    return json_response({**head, "choices": choices, "usage": generation.usage()})
