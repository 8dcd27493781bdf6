"""One request to an OpenAI-compatible server, and what became of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from bench.measurements import Arrival
from bench.serving_events import DONE, EventParser, decode_event
from bench.serving_http import HttpClient, HttpError, ResponseParser

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """`prompt`: text or token ids, or a chat's messages. `fields`: more of the body."""

    request_id: str
    prompt: Prompt
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What one request did; all times are seconds of `time.perf_counter`."""

    request_id: str
    due: float = 0.0  # when it should have been sent, before --max-concurrency held it back
    sent: float = 0.0
    finished: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)  # events with text or tokens
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where the server gives them
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    output_tokens: int = 0
    finish_reason: str | None = None
    failure: str | None = None  # its kind, such as "HTTP 429"
    error: str = ""  # what the server or the connection said

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def time_to_first_token(self) -> float:
        return (self.arrivals[0].when if self.arrivals else self.finished) - self.sent

    @property
    def latency(self) -> float:
        return self.finished - self.sent

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.time_to_first_token) / (self.output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between one event with tokens and the next."""
        return [after.when - before.when for before, after in pairwise(self.arrivals)]

    def fail(self, kind: str, error: str = "") -> None:
        """Only the first failure is kept."""
        if self.failure is None:
            self.failure, self.error = kind, error


class OpenAIServer:
    """The endpoint that is measured: makes bodies, sends them, reads the streams."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: str,
        model: str,
        *,
        chat: bool,
        fields: Mapping[str, Any] | None = None,
        timeout: float = 6 * 3600.0,
    ) -> None:
        """fields: sent with every request. timeout: seconds for a whole answer."""
        self.client = client
        self.chat = chat
        self._endpoint = endpoint
        self.model = model
        self._fields = dict(fields or {})
        self._timeout = timeout

    def body(self, request: ServingRequest) -> bytes:
        """The JSON that is sent."""
        values: dict[str, Any] = {"model": self.model}
        if self.chat:
            messages = request.prompt
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            values["messages"] = messages
            values["max_completion_tokens"] = request.max_tokens
        else:
            values["prompt"] = request.prompt
            values["max_tokens"] = request.max_tokens
        values |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({**values, **self._fields, **request.fields})

    async def send(self, request: ServingRequest, due: float | None = None) -> Outcome:
        """Send it and wait for the end. Never raises: failures are in the outcome."""
        body = self.body(request)
        outcome = Outcome(request.request_id)
        reader = _StreamReader(outcome, self.chat)
        outcome.sent = time.perf_counter()
        outcome.due = outcome.sent if due is None else due
        try:
            async with asyncio.timeout(self._timeout):
                response, _ = await self.client.request("POST", self._endpoint, body, reader.feed)
            reader.end(response)
        except TimeoutError:
            outcome.fail("timeout", f"no complete answer within {self._timeout:g} s")
        except (HttpError, OSError) as error:
            outcome.fail("connection", str(error))
        except msgspec.DecodeError as error:
            outcome.fail("bad event", str(error))
        outcome.finished = time.perf_counter()
        if outcome.failure is None and outcome.arrivals:
            # The usage event and [DONE] come after the last token: they are no part of it.
            outcome.finished = max(outcome.arrivals[-1].when, reader.finish_time)
        return outcome

    async def get_json(self, path: str) -> Any:
        """Raises HttpError for anything but a JSON answer with status 200."""
        return self._parse("GET", path, *await self.client.request("GET", path))

    async def post_json(self, path: str, value: Any) -> Any:
        """Raises HttpError for anything but a JSON answer with status 200."""
        body = msgspec.json.encode(value)
        return self._parse("POST", path, *await self.client.request("POST", path, body))

    @staticmethod
    def _parse(method: str, path: str, response: ResponseParser, body: bytes) -> Any:
        if response.status != 200:
            raise HttpError(
                f"{method} {path} was answered with status {response.status}: {_message(body)}"
            )
        try:
            return json.loads(body)
        except ValueError as error:
            raise HttpError(f"{method} {path} was not answered with JSON: {error}") from error


class _StreamReader:
    """Notes what a stream brings while it comes."""

    def __init__(self, outcome: Outcome, chat: bool) -> None:
        self._outcome = outcome
        self._chat = chat
        self._events = EventParser()
        self._done = False
        self._usage = False
        self._refusal: list[bytes] = []
        self.finish_time = 0.0

    def feed(self, response: ResponseParser, data: bytes) -> None:
        if response.status != 200:
            self._refusal.append(data)
            return
        now = time.perf_counter()
        outcome = self._outcome
        for payload in self._events.feed(data):
            if payload == DONE:
                self._done = True
                continue
            event = decode_event(payload)
            if event.error is not None:
                outcome.fail("error event", _message(payload))
            tokens, came = 0, False
            for choice in event.choices:
                if choice.token_ids:
                    tokens += len(choice.token_ids)
                    outcome.token_ids += choice.token_ids
                    came = True
                delta = choice.delta
                text = choice.text if delta is None else delta.content
                if text:
                    outcome.pieces.append(text)
                    came = True
                elif delta is not None:
                    came |= bool(delta.reasoning or delta.reasoning_content or delta.tool_calls)
                elif choice.text is not None and choice.finish_reason is None:
                    came = True  # a token that shows no text yet
                if choice.finish_reason is not None:
                    outcome.finish_reason = choice.finish_reason
                    self.finish_time = now
                    came |= not outcome.arrivals  # an answer without any text ends here
            if came:
                outcome.arrivals.append(Arrival(now, max(tokens, 1)))
            if event.usage is not None:
                self._usage = True
                usage = event.usage
                outcome.prompt_tokens = usage.prompt_tokens
                if usage.completion_tokens is not None:
                    outcome.output_tokens = usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def end(self, response: ResponseParser) -> None:
        """The response is complete: judge it."""
        outcome = self._outcome
        if response.status != 200:
            outcome.fail(f"HTTP {response.status}", _message(b"".join(self._refusal)))
        elif not outcome.arrivals:
            outcome.fail("no answer", "the stream ended without a token")
        elif outcome.finish_reason is None or not self._done:
            outcome.fail("incomplete stream", "the stream ended before its last event")
        elif not self._usage:
            # Servers that do not count: an event a token is the best guess.
            outcome.output_tokens = sum(arrival.tokens for arrival in outcome.arrivals)


def _message(body: bytes) -> str:
    """The sentence in an error object, or the beginning of whatever it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
