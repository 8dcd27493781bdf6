"""A response while it is answered: its items as they grow, and the events that say so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw, json, structs

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.chat_choices import start_chat
from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.generation import REASONING_USAGE, Generation
from megatron_hybrid.server.http.logprobs import chat_logprobs
from megatron_hybrid.server.http.protocol.response_items import sealed
from megatron_hybrid.server.http.responses.preparing import PreparedResponse, item_id
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Answers, Chunk
from megatron_hybrid.server.http.tool_calls.formats import Call
from megatron_hybrid.server.http.tool_calls.reader import as_openai
from megatron_hybrid.server.link.response_memory import StoreUnavailable

logger = logging.getLogger(__name__)

_COMPLETED, _INCOMPLETE, _IN_PROGRESS = "completed", "incomplete", "in_progress"
# By the finish reason of an answer that is not complete, why it is not.
_CUT = {"length": {"reason": "max_output_tokens"}, "abort": None}


@dataclass
class _Growing:
    """An item whose text is still coming: a message, or thoughts ("reasoning")."""

    kind: str
    item_id: str
    encode_delta: Callable[[int, str], bytes]
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def part(self, text: str) -> Chunk:
        """Its only part, with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def item(self, parts: Sequence[Chunk], status: str) -> Chunk:
        """The item itself, with these parts."""
        own: Chunk = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        head = {"id": self.item_id, "type": self.kind, "status": status}
        return {**head, **own, "content": parts}


class ResponseAnswers(Answers):
    """Of one response. Whole or in a stream, it is made in the same steps: an item is added, grows,
    and is done before the next one is added."""

    def __init__(
        self, serving: Serving, prepared: PreparedResponse, generation: Generation
    ) -> None:
        """Begins; raises what `Generation.start` raises."""
        super().__init__(serving, generation, prepared.chat.generation, number=1)
        self._prepared = prepared
        self._sequence = 0  # of the next event
        self._done: list[Chunk] = []  # items
        self._growing: _Growing | None = None
        self._tokens = 0  # whose log-probabilities were seen
        self._unsaid: list[Any] = []  # log-probabilities that wait for their text
        self._finish_reason: str | None = None
        start_chat(serving, prepared.chat, generation)

    def whole(self, answers: list[Delta]) -> Raw:
        self.events(answers[0])
        self._end_items()
        return self._end()

    def first_events(self) -> bytes:
        response = self._response(_IN_PROGRESS)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, delta: Delta) -> bytes:
        events = b""
        self._unsaid += self._logprobs_of_text(delta)
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning)
        for said in delta.in_order or [delta.text]:
            if isinstance(said, Call):
                events += self._finish(_COMPLETED) + self._call(said)
            elif said:
                events += self._grow("message", said, self._unsaid)
                self._unsaid = []
        self._finish_reason = delta.finish_reason
        return events

    def last_events(self) -> bytes:
        events = self._end_items()
        response = self._end()
        kind = "response.incomplete" if self._finish_reason in _CUT else "response.completed"
        return events + self._event(kind, response=response)

    def failed(self, error: Chunk) -> bytes:
        said = error["error"]
        shown = {name: said[name] for name in ("code", "message", "param")}
        # Of OpenAI's codes for responses those two that fit.
        code = "server_error" if said["type"] == "server_error" else "invalid_prompt"
        response = self._response("failed", error={"code": code, "message": said["message"]})
        return self._event("error", **shown) + self._event("response.failed", response=response)

    def _grow(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> bytes:
        """Text of thoughts, or of a message."""
        events, growing = b"", self._growing
        if growing is None or growing.kind != kind:
            events = self._finish(_COMPLETED)
            growing, added = self._add(kind)
            events += added
        growing.texts.append(text)
        growing.logprobs += logprobs
        if logprobs:
            return events + self._part_event(
                growing, "response.output_text.delta", delta=text, logprobs=logprobs
            )
        self._sequence += 1
        return events + growing.encode_delta(self._sequence - 1, text)

    def _add(self, kind: str) -> tuple[_Growing, bytes]:
        """A new item without text."""
        index = len(self._done)
        own_id = item_id(kind, self._prepared.response_id, index)
        growing = self._growing = _Growing(kind, own_id, _delta_encoder(kind, own_id, index))
        events = self._event(
            "response.output_item.added",
            output_index=index,
            item=growing.item([], _IN_PROGRESS),
        )
        part = growing.part("")
        return growing, events + self._part_event(growing, "response.content_part.added", part=part)

    def _finish(self, status: str) -> bytes:
        """End the item that grows, if there is one."""
        growing = self._growing
        if growing is None:
            return b""
        text = "".join(growing.texts)
        part = growing.part(text)
        if growing.kind == "reasoning":
            events = self._part_event(growing, "response.reasoning_text.done", text=text)
        else:
            events = self._part_event(
                growing, "response.output_text.done", text=text, logprobs=growing.logprobs
            )
        events += self._part_event(growing, "response.content_part.done", part=part)
        self._growing = None
        item = growing.item([part], status)
        if growing.kind == "reasoning" and self._prepared.seals:
            item["encrypted_content"] = sealed(text)
        return events + self._item_done(item)

    def _call(self, call: Call) -> bytes:
        index = len(self._done)
        own_id = item_id("function_call", self._prepared.response_id, index)
        called = as_openai(call)
        function = called["function"]
        done = {
            "id": own_id,
            "type": "function_call",
            "status": _COMPLETED,
            "call_id": called["id"],
            **function,
        }
        added = {**done, "status": _IN_PROGRESS, "arguments": ""}
        place = {"item_id": own_id, "output_index": index}
        kind = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", output_index=index, item=added)
            + self._event(f"{kind}.delta", **place, delta=function["arguments"])
            + self._event(f"{kind}.done", **place, **function)
            + self._item_done(done)
        )

    def _item_done(self, item: Chunk) -> bytes:
        index = len(self._done)
        self._done.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _end_items(self) -> bytes:
        """The answer is there: end what still grows. What was not cut off holds a message at least,
        or a call."""
        if self._finish_reason in _CUT:
            return self._finish(_INCOMPLETE)
        events = self._finish(_COMPLETED)
        if not self._done or self._done[-1]["type"] == "reasoning":
            events += self._add("message")[1] + self._finish(_COMPLETED)
        return events

    def _end(self) -> Raw:
        """The response as it stays, and is stored."""
        cut = self._finish_reason in _CUT
        response = self._response(
            _INCOMPLETE if cut else _COMPLETED,
            usage=_usage(self._generation.usage()),
            incomplete_details=_CUT.get(self._finish_reason or ""),
            completed_at=None if cut else int(time.time()),
        )
        memory, stored = self._serving.responses, self._prepared.stored
        if memory is not None and stored is not None:
            kept = structs.replace(stored, body=bytes(response))
            try:
                memory.keep(self._prepared.response_id, kept)
            except StoreUnavailable:  # whoever asks for it is told so
                logger.warning("Response %s is not stored.", self._prepared.response_id)
        return response

    def _response(self, status: str, **changes: Any) -> Raw:
        """The response as a JSON object, with the items that are done."""
        fields = {
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": self._done,
            "usage": None,
            **changes,
        }
        return Raw(self._prepared.head + b"," + json.encode(fields)[1:])

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _part_event(self, growing: _Growing, kind: str, **fields: Any) -> bytes:
        """Of the only part of the item that grows."""
        place = {"item_id": growing.item_id, "output_index": len(self._done), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _logprobs_of_text(self, delta: Delta) -> list[Any]:
        """Those of tokens after the thoughts, which have no place for theirs."""
        if self._wanted.params.logprobs is None:
            return []
        usage: dict[str, Any] = self._generation.usage_so_far(0)
        thoughts = usage.get(REASONING_USAGE, {}).get("reasoning_tokens", 0)
        entries: Sequence[TokenLogprob] = delta.logprobs[max(0, thoughts - self._tokens) :]
        self._tokens += len(delta.logprobs)
        return list(chat_logprobs(self._serving.tokenizer, entries)["content"])


def _delta_encoder(kind: str, own_id: str, index: int) -> Callable[[int, str], bytes]:
    """Encodes events of new text without log-probabilities, each with its number: what is the same
    in all of them is encoded here."""
    name = f"response.{'reasoning' if kind == 'reasoning' else 'output'}_text.delta"
    place: Chunk = {"type": name, "item_id": own_id, "output_index": index, "content_index": 0}
    if kind == "message":
        place["logprobs"] = []
    before = b"event: " + name.encode() + b"\ndata: " + json.encode(place)[:-1]

    def encode(number: int, text: str) -> bytes:
        return b'%s,"sequence_number":%d,"delta":%s}\n\n' % (before, number, json.encode(text))

    return encode


def _usage(usage: dict[str, Any]) -> Chunk:
    """Tokens in the words of responses, whose clients expect every field."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    thoughts = usage.get(REASONING_USAGE, {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage["total_tokens"],
    }
