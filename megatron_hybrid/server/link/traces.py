"""What a front-end worker tells the trace exporter of a request that has ended: times and counts,
never a prompt or an answer.

The exporter is a process of its own, since gevent's greenlets and gRPC don't go together, and so
that a collector that does not answer holds up nobody. Nothing is waited for here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from megatron_hybrid.server.link.sockets import zmq_module

TRACES = "traces"  # the name of the exporter's socket
MOST_QUEUED = 1000  # traces, for an exporter that does not read; more are dropped


class AnswerTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer. Times are seconds since the request came; None: it did not come so far.

    begun: it left the engine's queue. first_token: its prompt is computed. ended: the client has
    all of it, or does not want more.
    """

    prompt_tokens: int
    cached_tokens: int  # of the prompt, which were not computed
    tokens: int
    begun: float | None = None
    first_token: float | None = None
    ended: float | None = None
    finish_reason: str | None = None  # as the client sees it
    preemptions: int = 0


class RequestTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One HTTP request.

    parent: the W3C headers that it came with. started: seconds since 1970; seconds: until all was
    sent. submitted: when the engine was given it, counted as in AnswerTrace. status: HTTP's, or
    what fits what broke a stream off. attributes: OpenTelemetry's names and values.
    """

    name: str
    started: float
    seconds: float
    status: int
    attributes: dict[str, Any]
    parent: dict[str, str] = {}
    submitted: float | None = None
    answers: list[AnswerTrace] = []


_encode = msgspec.msgpack.Encoder().encode
decode_trace = msgspec.msgpack.Decoder(RequestTrace).decode


class TraceSender:
    """A worker's way to the exporter at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._zmq = zmq_module()
        self._socket = self._zmq.Context().socket(self._zmq.PUSH)
        self._socket.set_hwm(MOST_QUEUED)
        self._socket.setsockopt(self._zmq.LINGER, 500)
        self._socket.connect(endpoint)

    def send(self, trace: RequestTrace) -> None:
        """It is dropped where too many wait."""
        with contextlib.suppress(self._zmq.Again):
            self._socket.send(_encode(trace), self._zmq.NOBLOCK)
