"""/v1/chat/completions: answers in OpenAI's chat shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.chat_choices import start_chat
from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.logprobs import chat_logprobs
from megatron_hybrid.server.http.prepared import PreparedChat
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Chunk, ChunkAnswers, versions_of
from megatron_hybrid.server.http.tool_calls.reader import as_openai


class ChatAnswers(ChunkAnswers):
    """Of one chat. As events: one with the role before a choice's first text, and one with the
    reason at its end."""

    def __init__(self, serving: Serving, chat: PreparedChat, generation: Generation) -> None:
        """Begins; raises what `Generation.start` raises."""
        wanted = chat.generation
        name = "chat.completion.chunk" if wanted.stream else "chat.completion"
        super().__init__(serving, generation, wanted, number=wanted.params.n, name=name)
        self._texts: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        self._thoughts: dict[int, Callable[[str], bytes]] = {}  # of those that have thought
        self._calls: dict[int, int] = {}  # how many each choice has made
        # With the answer, or with the very first event.
        self._prompt_token_ids = chat.prompt.tolist() if wanted.return_token_ids else None
        if self._prompt_token_ids is not None and not wanted.stream:
            self.head["prompt_token_ids"] = self._prompt_token_ids
        start_chat(serving, chat, generation)

    def choice(self, answer: Delta) -> Chunk:
        message: Chunk = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message |= _thoughts(answer.reasoning)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [as_openai(call) for call in answer.calls]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
        return (
            choice if self._prompt_token_ids is None else {**choice, "token_ids": answer.token_ids}
        )

    def events(self, delta: Delta) -> bytes:
        index = delta.index
        encode_text = self._texts.get(index)
        events = b""
        if encode_text is None:
            ids = None if self._texts else self._prompt_token_ids
            encode_text = self.text_events(lambda text: _chunk(index, {"content": text}))
            self._texts[index] = encode_text
            role = _chunk(index, {"role": "assistant", "content": ""})
            events = self.event(role, ids, begun=False)
        if delta.logprobs or delta.token_ids:
            said: Chunk = {"content": delta.text} if delta.text or not delta.reasoning else {}
            chunk = _chunk(index, _thoughts(delta.reasoning) | said if delta.reasoning else said)
            chunk["logprobs"] = self._logprobs(delta.logprobs)
            if delta.token_ids:
                chunk["token_ids"] = delta.token_ids
            events += self.event(chunk)
        else:
            if delta.reasoning:
                events += self._encode_thoughts(index)(delta.reasoning)
            if delta.text:
                events += encode_text(delta.text)
        for call in delta.calls:
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            calls = [{"index": number, **as_openai(call)}]
            events += self.event(_chunk(index, {"tool_calls": calls}))
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, **versions_of(delta)}
            events += self.event({**_chunk(index, {}), **end})
        return events

    def _encode_thoughts(self, index: int) -> Callable[[str], bytes]:
        if index not in self._thoughts:
            self._thoughts[index] = self.text_events(lambda text: _chunk(index, _thoughts(text)))
        return self._thoughts[index]

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._wanted.params.logprobs is None:
            return None
        return chat_logprobs(self._serving.tokenizer, entries)


def _thoughts(text: str) -> Chunk:
    """In a message or a delta, under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(index: int, delta: dict[str, Any]) -> Chunk:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
