"""One turn of a chat: its prompt, with the tokens of answers that this server gave, and what has
to be remembered of the answers to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hybrid.answer_places import GeneratedAnswer
from megatron_hybrid.server.answer_memory import AnswerMemoryClient, ChatKeys
from megatron_hybrid.server.answer_record import AnswerRecord, CompleteAnswer
from megatron_hybrid.server.openai_protocol import ChatRequest
from megatron_hybrid.server.serving import Serving
from megatron_hybrid.server.tool_calls.fields import Tools
from megatron_hybrid.tokenizer import EncodedPrompt, Message


def with_tool_grammar(serving: Serving, request: ChatRequest) -> ChatRequest:
    """The request with the grammar that forced or strict calls need; refuses tools that the model
    cannot have."""
    wanted = request.generation
    params = serving.tool_calling.params(request.tools, wanted.params)
    if params is wanted.params:
        return request
    return dataclasses.replace(request, generation=dataclasses.replace(wanted, params=params))


def encode_chat(
    serving: Serving,
    messages: Sequence[Message],
    template_arguments: Mapping[str, Any],
    tools: Tools,
    keys: ChatKeys,
) -> EncodedPrompt:
    """The prompt of a chat, in which answers that are remembered are the tokens that they were."""
    serving.tool_calling.check(tools)
    answers = _remembered(serving.answers, keys)

    def same_calls(text: str, message: Message) -> bool:
        return serving.tool_calling.says_the_same(tools.schemas, text, message)

    def encode() -> EncodedPrompt:
        return serving.tokenizer.encode_chat_with_ends(
            messages,
            template_arguments,
            tools.descriptions,
            answers=answers,
            same_calls=same_calls,
        )

    return serving.offload(sum(map(_length, messages)), encode)


def _remembered(memory: AnswerMemoryClient | None, keys: ChatKeys) -> dict[int, GeneratedAnswer]:
    if memory is None or not keys.asked:
        return {}
    found = memory.find([asked.key for asked in keys.asked])
    return {
        asked.number: answer
        for asked, answer in zip(keys.asked, found, strict=True)
        if answer is not None
    }


def _length(message: Message) -> int:
    """About how many characters, tool calls aside."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part)) for part in content)


class ChatTurn:
    """What belongs to one request besides its body."""

    def __init__(self, serving: Serving, request: ChatRequest) -> None:
        self._serving = serving
        self._request = request
        self._keys = ChatKeys(request.generation.cache_salt, request.messages)

    def prompt(self) -> EncodedPrompt:
        request = self._request
        return encode_chat(
            self._serving,
            request.messages,
            request.template_arguments,
            request.tools,
            self._keys,
        )

    def record(self) -> AnswerRecord | None:
        """For one choice; None if nothing is to be found in it or remembered of it."""
        calling, tools = self._serving.tool_calling, self._request.tools
        reader = calling.reader(tools)
        if reader is None and self._serving.answers is None:
            return None
        visible = calling.visible_ids if reader is not None else frozenset()
        return AnswerRecord(self._serving.tokenizer, reader, visible, self._remember)

    def _remember(self, answer: CompleteAnswer) -> None:
        if self._serving.answers is None or not answer.generated.token_ids:
            return
        calls = [
            {"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
        key = self._keys.key_of({"content": answer.text, "tool_calls": calls})
        self._serving.answers.remember(key, *answer.generated)
