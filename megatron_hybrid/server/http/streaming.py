"""Server-sent events: what both endpoints do to stream, and to answer in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flask import Response
from msgspec import json

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http.generation import ClientGone, Delta, Generation
from megatron_hybrid.server.http.http_errors import describe
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.tool_calls.formats import Call

Chunk = dict[str, Any]
EventMaker = Callable[[Delta], bytes]  # the events of one delta, in order

_DONE = b"data: [DONE]\n\n"
_TEXT_GOES_HERE = "~text~"


@dataclass(slots=True)
class Answer:
    """One choice, complete."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def collect(generation: Generation, choices: int) -> list[Answer]:
    """Wait for every choice to end."""
    answers = [Answer() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in range(choices)]
    for deltas in generation.deltas():
        for delta in deltas:
            texts[delta.index].append(delta.text)
            answers[delta.index].logprobs.extend(delta.logprobs)
            answers[delta.index].calls.extend(delta.calls)
            answers[delta.index].token_ids.extend(delta.token_ids)
            answers[delta.index].finish_reason = delta.finish_reason
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    return answers


class EventFrame:
    """What all events of an answer have in common, encoded once."""

    def __init__(self, head: Chunk, *, include_usage: bool) -> None:
        """head: every chunk's fields besides "choices" and "usage"."""
        self._before = b"data: " + json.encode(head)[:-1] + b',"choices":['
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = b"]" + self._end

    def event(self, choice: Chunk) -> bytes:
        return self._before + json.encode(choice) + self._after

    def opening(self, choice: Chunk, prompt_token_ids: list[int] | None) -> bytes:
        """The event before a choice's text; prompt_token_ids: to be given with it."""
        return self._before + json.encode(choice) + _prompt_ids(prompt_token_ids) + self._end

    def usage(self, usage: Chunk) -> bytes:
        """The event that comes last, without choices."""
        return self._before + b'],"usage":' + json.encode(usage) + b"}\n\n"

    def text_events(self, make_choice: Callable[[str], Chunk]) -> Callable[[str], bytes]:
        """Encodes `event(make_choice(text))`: what is the same for every text is encoded here."""
        whole = self.event(make_choice(_TEXT_GOES_HERE))
        before, _, after = whole.rpartition(json.encode(_TEXT_GOES_HERE))

        def encode(text: str) -> bytes:
            return before + json.encode(text) + after

        return encode


class UsageFrame(EventFrame):
    """Every event says what its choice has used so far."""

    def __init__(self, head: Chunk, usage_so_far: Callable[[int], Chunk]) -> None:
        """usage_so_far: of the choice with an index."""
        super().__init__(head, include_usage=True)
        self._usage_so_far = usage_so_far

    def event(self, choice: Chunk) -> bytes:
        usage = json.encode(self._usage_so_far(choice["index"]))
        return self._before + json.encode(choice) + b'],"usage":' + usage + b"}\n\n"

    def opening(self, choice: Chunk, prompt_token_ids: list[int] | None) -> bytes:
        # The first token is there already, but its text is still to come.
        usage = self._usage_so_far(choice["index"])
        usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        end = _prompt_ids(prompt_token_ids) + b',"usage":' + json.encode(usage) + b"}\n\n"
        return self._before + json.encode(choice) + end

    def text_events(self, make_choice: Callable[[str], Chunk]) -> Callable[[str], bytes]:
        return lambda text: self.event(make_choice(text))


def frame_of(generation: Generation, head: Chunk, wanted: GenerationRequest) -> EventFrame:
    """What the events of this request's answers have in common."""
    if wanted.continuous_usage:
        return UsageFrame(head, generation.usage_so_far)
    return EventFrame(head, include_usage=wanted.include_usage)


def _prompt_ids(token_ids: list[int] | None) -> bytes:
    """What comes after the choice."""
    return b"]" if token_ids is None else b'],"prompt_token_ids":' + json.encode(token_ids)


def stream(
    generation: Generation, frame: EventFrame, make_events: EventMaker, *, include_usage: bool
) -> Response:
    """Answer with events as they come.

    The first ones are awaited here, so that a request that fails at once gets a proper status.
    """
    deltas = generation.deltas()
    first = next(deltas, [])
    body = _events(generation, _chain(first, deltas), frame, make_events, include_usage)
    response = Response(body, mimetype="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would collect the events
    return response


def _chain(first: list[Delta], rest: Iterator[list[Delta]]) -> Iterator[list[Delta]]:
    yield first
    yield from rest


def _events(
    generation: Generation,
    batches: Iterable[list[Delta]],
    frame: EventFrame,
    make_events: EventMaker,
    include_usage: bool,
) -> Iterator[bytes]:
    waiting: dict[int, Delta] = {}  # log-probabilities of text that is held back
    try:
        for batch in batches:
            if len(batch) == 1 and not waiting and _is_shown(batch[0]):
                events = make_events(batch[0])  # what nearly every token comes to
            else:
                events = b"".join(map(make_events, _by_choice(batch, waiting)))
            if events:
                yield events
        if include_usage:
            yield frame.usage(generation.usage())
    except (ClientGone, GeneratorExit):
        generation.failure = ClientGone.status
        return
    except Exception as error:  # the status line is out: the error goes into the stream
        generation.failure, body = describe(error)
        yield b"data: " + json.encode(body) + b"\n\n"
    finally:
        generation.close()
    yield _DONE


def _by_choice(batch: list[Delta], waiting: dict[int, Delta]) -> list[Delta]:
    """One delta for each choice that has something to show."""
    merged = dict(waiting)
    waiting.clear()
    for delta in batch:
        earlier = merged.get(delta.index)
        merged[delta.index] = (
            delta
            if earlier is None
            else Delta(
                delta.index,
                earlier.text + delta.text,
                earlier.logprobs + delta.logprobs,
                delta.finish_reason,
                earlier.calls + delta.calls,
                earlier.token_ids + delta.token_ids,
            )
        )
    shown = []
    for delta in merged.values():
        if _is_shown(delta):
            shown.append(delta)
        else:
            waiting[delta.index] = delta
    return shown


def _is_shown(delta: Delta) -> bool:
    """Whether it makes an event now. Log-probabilities alone wait for their text."""
    return bool(delta.text or delta.calls or delta.token_ids or delta.finish_reason)
