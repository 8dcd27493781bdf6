"""Server-sent events: what both endpoints do to stream, and to answer in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from flask import Response
from msgspec import json

from megatron_hybrid.server.http.generation import ClientGone, Delta, Generation
from megatron_hybrid.server.http.http_errors import describe
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest

Chunk = dict[str, Any]
EventMaker = Callable[[Delta], bytes]  # the events of one delta, in order

_DONE = b"data: [DONE]\n\n"
_TEXT_GOES_HERE = "~text~"


def collect(generation: Generation, number: int) -> list[Delta]:
    """Wait for so many choices to end; each as one piece."""
    answers = [Delta(index, "") for index in range(number)]
    texts: list[list[str]] = [[] for _ in answers]
    for delta in chain.from_iterable(generation.deltas()):
        answer = answers[delta.index]
        texts[delta.index].append(delta.text)
        answer.logprobs += delta.logprobs
        answer.calls += delta.calls
        answer.token_ids += delta.token_ids
        answer.finish_reason = delta.finish_reason
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    return answers


class EventFrame:
    """What all events of an answer have in common, encoded once."""

    def __init__(self, generation: Generation, head: Chunk, wanted: GenerationRequest) -> None:
        """head: every chunk's fields besides "choices" and "usage"."""
        self.include_usage = wanted.include_usage
        self._usage_so_far = generation.usage_so_far if wanted.continuous_usage else None
        self._before = b"data: " + json.encode(head)[:-1] + b',"choices":['
        self._end = b',"usage":null}\n\n' if wanted.include_usage else b"}\n\n"

    def event(self, choice: Chunk) -> bytes:
        """The event of one entry of "choices"."""
        return self._before + json.encode(choice) + b"]" + self._usage_of(choice)

    def opening(self, choice: Chunk, prompt_token_ids: list[int] | None) -> bytes:
        """The event before a choice's text; prompt_token_ids: to be given with it."""
        ids = b""
        if prompt_token_ids is not None:
            ids = b',"prompt_token_ids":' + json.encode(prompt_token_ids)
        return self._before + json.encode(choice) + b"]" + ids + self._usage_of(choice, begun=False)

    def usage(self, usage: Chunk) -> bytes:
        """The event that comes last, without choices."""
        return self._before + b'],"usage":' + json.encode(usage) + b"}\n\n"

    def text_events(self, make_choice: Callable[[str], Chunk]) -> Callable[[str], bytes]:
        """Encodes `event(make_choice(text))`: what is the same for every text is encoded here."""
        if self._usage_so_far is not None:
            return lambda text: self.event(make_choice(text))
        whole = self.event(make_choice(_TEXT_GOES_HERE))
        before, _, after = whole.rpartition(json.encode(_TEXT_GOES_HERE))
        return lambda text: before + json.encode(text) + after

    def _usage_of(self, choice: Chunk, *, begun: bool = True) -> bytes:
        """The end of an event: what its choice has used so far, where every event says it."""
        if self._usage_so_far is None:
            return self._end
        usage = self._usage_so_far(choice["index"])
        if not begun:  # the first token is there already, but its text is still to come
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return b',"usage":' + json.encode(usage) + b"}\n\n"


def stream(generation: Generation, frame: EventFrame, make_events: EventMaker) -> Response:
    """Answer with events as they come.

    The first ones are awaited here, so that a request that fails at once gets a proper status.
    """
    deltas = generation.deltas()
    first = next(deltas, [])
    body = _events(generation, chain([first], deltas), frame, make_events)
    response = Response(body, mimetype="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would collect the events
    return response


def _events(
    generation: Generation,
    batches: Iterable[list[Delta]],
    frame: EventFrame,
    make_events: EventMaker,
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
        if frame.include_usage:
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
