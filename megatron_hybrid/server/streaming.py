"""Server-sent events: what both endpoints do to stream, and to answer in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flask import Response
from msgspec import json

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.generation import ClientGone, Delta, Generation
from megatron_hybrid.server.http_errors import describe

Chunk = dict[str, Any]
ChunkMaker = Callable[[Delta], list[Chunk]]  # the "choices" entries of one delta, in order

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """One choice, complete."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


def collect(generation: Generation, choices: int) -> list[Answer]:
    """Wait for every choice to end."""
    answers = [Answer() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in range(choices)]
    for deltas in generation.deltas():
        for delta in deltas:
            texts[delta.index].append(delta.text)
            answers[delta.index].logprobs.extend(delta.logprobs)
            answers[delta.index].finish_reason = delta.finish_reason
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    return answers


def stream(
    generation: Generation, head: Chunk, make_chunks: ChunkMaker, *, include_usage: bool
) -> Response:
    """Answer with events as they come.

    The first ones are awaited here, so that a request that fails at once gets a proper status.
    """
    deltas = generation.deltas()
    first = next(deltas, [])
    if include_usage:
        head = {**head, "usage": None}
    body = _events(generation, _chain(first, deltas), head, make_chunks, include_usage)
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
    head: Chunk,
    make_chunks: ChunkMaker,
    include_usage: bool,
) -> Iterator[bytes]:
    waiting: dict[int, Delta] = {}  # log-probabilities of text that is held back
    try:
        for batch in batches:
            chunks = [chunk for delta in _by_choice(batch, waiting) for chunk in make_chunks(delta)]
            if chunks:
                yield b"".join(_event({**head, "choices": [chunk]}) for chunk in chunks)
        if include_usage:
            yield _event({**head, "choices": [], "usage": generation.usage()})
    except ClientGone:
        return
    except Exception as error:  # the status line is out: the error goes into the stream
        yield _event(describe(error)[1])
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
            )
        )
    shown = []
    for delta in merged.values():
        if delta.text or delta.finish_reason is not None:
            shown.append(delta)
        else:
            waiting[delta.index] = delta
    return shown


def _event(value: Any) -> bytes:
    return b"data: " + json.encode(value) + b"\n\n"
