"""truncate_prompt_tokens: what is left of a prompt of which only the last tokens are wanted."""

from __future__ import annotations

from megatron_hybrid.request import Unasked
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.link.messages import EngineReady
from megatron_hybrid.text.tokenizer import EncodedPrompt


def kept(request: GenerationRequest, engine: EngineReady) -> int | None:
    """How many tokens of a prompt are kept at most; None: all."""
    if request.last_tokens != -1:
        return request.last_tokens
    asked = request.params.max_tokens
    answer = 1 if asked is None or isinstance(asked, Unasked) else asked
    return max(1, engine.max_seq_length - max(1, answer, request.params.min_tokens))


def last_of(prompt: EncodedPrompt, most: int | None) -> EncodedPrompt:
    """Not more than so many tokens, the last ones; None: all."""
    cut = 0 if most is None else max(0, len(prompt.token_ids) - most)
    if not cut:
        return prompt
    ends = tuple(end - cut for end in prompt.message_ends if end > cut)
    return EncodedPrompt(prompt.token_ids[cut:], ends)
