"""What every route needs: the engine's client, the tokenizer, the options, and who may come in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_hybrid.server.http.metrics import ServerMetrics
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.preparers import Preparers
from megatron_hybrid.server.link.answer_memory import AnswerMemoryClient
from megatron_hybrid.server.link.response_memory import ResponseMemoryClient
from megatron_hybrid.server.link.subscription import Overloaded
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.reasoning import special_marks
from megatron_hybrid.text.tokenizer import Tokenizer

MOST_BYTES_HERE = 2**14  # of a body; they take 20 ms at most, in odd chats and schemas


class Serving:
    """answers: the memory of answers that were given; without it, chats are only their text.
    responses: that of stored responses; None: none are stored. preparers: processes for large
    bodies; None: all are prepared here."""

    def __init__(
        self,
        client: ReplicaSet,
        tokenizer: Tokenizer,
        options: ServerOptions,
        answers: AnswerMemoryClient | None = None,
        preparers: Preparers | None = None,
        responses: ResponseMemoryClient | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.options = options
        self.answers = answers
        self.responses = responses
        self._preparation = Preparation(
            tokenizer,
            options,
            None if answers is None else lambda: answers,
            None if responses is None else lambda: responses,
        )
        self._preparers = preparers
        self.tool_calling = self._preparation.tool_calling
        self.reasoning = form = self._preparation.reasoning
        # Ids that an answer's text shows though they are special, since thoughts are read by them.
        self.reasoning_marks = frozenset() if form is None else special_marks(form, tokenizer)
        self.metrics = ServerMetrics(client)
        self._places = threading.BoundedSemaphore(options.connections_a_worker)

    def prepare(
        self, name: str, body: Sequence[bytes], *more: Any, may_be_long: bool = False
    ) -> Any:
        """What the method `name` of Preparation makes of a body, which comes in pieces: here, or in
        another process, so that this one's streams go on meanwhile. more: what it takes besides.
        may_be_long: though the body is not, since it names what is stored."""
        engine = self.client.check()
        may_be_long = may_be_long or sum(map(len, body)) > MOST_BYTES_HERE
        if self._preparers is not None and may_be_long:
            return self._preparers.prepare(name, body, engine, *more)
        return getattr(self._preparation, name)(b"".join(body), engine, *more)

    def take_place(self) -> Callable[[], None]:
        """One of the server's places for open requests; what gives it back.

        Raises EngineUnavailable, or Overloaded when there is no place.
        """
        self.client.check()
        if not self._places.acquire(blocking=False):
            limit = self.options.connections_a_worker
            raise Overloaded(
                f"{limit} requests are being answered; the limit is {limit} "
                "(--http-connections, divided by --http-workers). Try again later."
            )
        return self._places.release
