"""/v1/messages: answers as Anthropic's messages, whole or as their events."""

from __future__ import annotations

import json as text_json
import secrets
from typing import Any

from msgspec import json

from megatron_hybrid.request import FinishReason
from megatron_hybrid.server.http.anthropic.errors import as_anthropic
from megatron_hybrid.server.http.chat_choices import start_chat
from megatron_hybrid.server.http.choice import TOOL_CALLS, Delta
from megatron_hybrid.server.http.generation import REASONING_USAGE, Generation
from megatron_hybrid.server.http.prepared import PreparedChat
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Answers, Chunk
from megatron_hybrid.server.http.tool_calls.formats import Call

# Clients want one, and send it back; nothing here depends on it.
SIGNATURE = "bWVnYXRyb24taHlicmlk"
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_THINKING, _TEXT = "thinking", "text"
_CONTEXT_FULL = "model_context_window_exceeded"
_BEGUN: dict[str, Chunk] = {
    _THINKING: {"type": "thinking", "thinking": "", "signature": ""},
    _TEXT: {"type": "text", "text": ""},
}


class MessageAnswers(Answers):
    """Of one chat. As events: the message's start, its blocks one after the other, its end."""

    def __init__(
        self, serving: Serving, chat: PreparedChat, request_id: str, generation: Generation
    ) -> None:
        """Begins; raises what `Generation.start` raises. request_id: for what is said of errors."""
        super().__init__(serving, generation, chat.generation, number=1)
        self._request_id = request_id
        self._last_mark = max(chat.generation.cache_checkpoints, default=0)
        self._block: str | None = None  # the kind of the one that is open
        self._index = 0  # its number, or that of the next one
        self._around = b""  # before the text of its events
        self._end: Chunk = {}
        start_chat(serving, chat, generation)

    def whole(self, answers: list[Delta]) -> Chunk:
        (answer,) = answers
        content: list[Chunk] = []
        if answer.reasoning:
            shown = "" if self._wanted.hide_thoughts else answer.reasoning
            content.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        content += [_tool_use(call, call.arguments) for call in answer.calls]
        return {**self._message(content), **self._ended(answer), "usage": self._usage()}

    def first_events(self) -> bytes:
        ended = {"stop_reason": None, "stop_sequence": None}
        usage = {**self._prompt_usage(), "output_tokens": 0}
        message = {**self._message([]), **ended, "usage": usage}
        return _event("message_start", {"message": message}) + _PING

    def events(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._begin(_THINKING)
            if not self._wanted.hide_thoughts:
                events += self._around + json.encode(delta.reasoning) + b"}}\n\n"
        if delta.text:
            events += self._begin(_TEXT) + self._around + json.encode(delta.text) + b"}}\n\n"
        for call in delta.calls:
            events += self._finish() + self._tool_use_events(call)
        if delta.finish_reason is not None:
            self._end = self._ended(delta)
            events += self._finish()
        return events

    def last_events(self) -> bytes:
        return _event("message_delta", {"delta": self._end, "usage": self._usage()}) + _STOP

    def failed(self, error: Chunk) -> bytes:
        _, body = as_anthropic(self._generation.failure or 500, error, self._request_id)
        return b"event: error\ndata: " + json.encode(body) + b"\n\n"

    def _begin(self, kind: str) -> bytes:
        """The events, if any, after which text of this kind may come."""
        if self._block == kind:
            return b""
        events = self._finish()
        self._block = kind
        # What all of the block's deltas have in common, encoded once.
        delta = _event(
            "content_block_delta",
            {"index": self._index, "delta": {"type": f"{kind}_delta", kind: ""}},
        )
        self._around = delta.removesuffix(b'""}}\n\n')
        return events + self._start_block(_BEGUN[kind])

    def _finish(self) -> bytes:
        """The end of the block that is open, if one is."""
        if self._block is None:
            return b""
        events = b""
        if self._block == _THINKING:
            events = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._block = None
        return events + self._stop_block()

    def _tool_use_events(self, call: Call) -> bytes:
        arguments = text_json.dumps(call.arguments, ensure_ascii=False)
        return (
            self._start_block(_tool_use(call, {}))
            + self._delta({"type": "input_json_delta", "partial_json": arguments})
            + self._stop_block()
        )

    def _start_block(self, block: Chunk) -> bytes:
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: Chunk) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _stop_block(self) -> bytes:
        self._index += 1
        return _event("content_block_stop", {"index": self._index - 1})

    def _message(self, content: list[Chunk]) -> Chunk:
        return {
            "id": self._generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
        }

    def _ended(self, answer: Delta) -> Chunk:
        """Why the answer has ended."""
        reason, stop = "end_turn", None
        if answer.finish_reason == TOOL_CALLS:
            reason = "tool_use"
        elif answer.finish_reason == FinishReason.LENGTH.value:
            reason = "max_tokens" if self._is_as_long_as_asked() else _CONTEXT_FULL
        elif answer.finish_reason == FinishReason.ABORT.value:
            reason = "pause_turn"  # whoever sends it back has it gone on with
        elif answer.stop is not None:
            reason, stop = "stop_sequence", answer.stop
        return {"stop_reason": reason, "stop_sequence": stop}

    def _is_as_long_as_asked(self) -> bool:
        used: Any = self._generation.usage()
        asked = self._wanted.params.max_tokens or 0
        return bool(used["completion_tokens"] >= asked)

    def _usage(self) -> Chunk:
        """Tokens read and written."""
        used: Any = self._generation.usage()
        usage = {**self._prompt_usage(), "output_tokens": used["completion_tokens"]}
        if (details := used.get(REASONING_USAGE)) is not None:
            usage["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return usage

    def _prompt_usage(self) -> Chunk:
        """Of the prompt: what was computed up to the last mark of cache_control counts as written
        to the cache."""
        used: Any = self._generation.usage()
        prompt, details = used["prompt_tokens"], used.get("prompt_tokens_details")
        if details is None:
            return {"input_tokens": prompt}
        cached = details["cached_tokens"]
        written = max(0, self._last_mark - cached)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
        }


def _tool_use(call: Call, arguments: dict[str, Any]) -> Chunk:
    identity = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": identity, "name": call.name, "input": arguments}


def _event(kind: str, data: Chunk) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.encode({"type": kind, **data}))
