"""What bodies become before the engine is asked: prompts in tokens, and what their answers need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from megatron_hybrid.errors import RequestError
from megatron_hybrid.server.http.logprobs import EchoedPrompt
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.protocol.tools import Tools
from megatron_hybrid.server.link.answer_memory import ChatKeys
from megatron_hybrid.text.reasoning import Opening


class UnknownModel(RequestError):
    """The client asks for a model that is not served here."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"
    field = "model"


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat whose prompt is in tokens, and what its answers are read and remembered by.
    `begins`: how they begin, where the model thinks."""

    generation: GenerationRequest
    prompt: array[int]
    message_ends: tuple[int, ...]
    tools: Tools
    keys: ChatKeys
    begins: Opening = Opening.UNKNOWN


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """Prompts in tokens; `echoed`: what is shown of each, if that is wanted."""

    generation: GenerationRequest
    prompts: list[array[int]]
    echoed: list[EchoedPrompt]


@dataclass(frozen=True, slots=True)
class PreparedScores:
    """For each answer the prompt and it, in tokens; answers begin behind `prompt_tokens`.
    `with_top`: the likeliest tokens at each place are shown, too."""

    generation: GenerationRequest
    prompts: list[array[int]]
    prompt_tokens: int
    with_top: bool
