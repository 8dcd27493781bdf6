"""What every route needs: the engine's client, the tokenizer, the options, and who may come in."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from megatron_hybrid.request import validate_prompt
from megatron_hybrid.server.answer_memory import AnswerMemoryClient
from megatron_hybrid.server.fields import FieldError
from megatron_hybrid.server.generation import Generation
from megatron_hybrid.server.metrics import ServerMetrics
from megatron_hybrid.server.openai_protocol import GenerationRequest
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replica_set import Engines
from megatron_hybrid.server.sockets import is_patched
from megatron_hybrid.server.subscription import Overloaded
from megatron_hybrid.server.tool_calls.calling import ToolCalling
from megatron_hybrid.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096  # characters; tokenizing as many takes about a millisecond


class UnknownModel(LookupError):
    """The client asks for a model that is not served here."""


class Serving:
    """answers: the memory of answers that were given; without it, chats are only their text."""

    def __init__(
        self,
        client: Engines,
        tokenizer: Tokenizer,
        options: ServerOptions,
        answers: AnswerMemoryClient | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.options = options
        self.answers = answers
        self.tool_calling = ToolCalling(tokenizer, options.tool_call_parser)
        self.metrics = ServerMetrics(client)
        self._lock = threading.Lock()
        self._open = 0

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.options.model_name, self.options.tokenizer_folder):
            raise UnknownModel(
                f"The model {name!r} is not served here; this server has "
                f"{self.options.model_name!r}."
            )

    def check_prompt(self, field: str, prompt: list[int], request: GenerationRequest) -> None:
        """Refuse what can never run, before it takes a place in the queue."""
        engine = self.client.check()
        limit, flag = engine.max_seq_length, engine.max_seq_length_flag
        validate_prompt(prompt, engine.vocab_size, limit, field, flag=flag)
        for name, wanted in request.asked_tokens.items():
            if wanted > limit - len(prompt):
                raise FieldError(
                    name,
                    f"{name} is {wanted}, but {field} has {len(prompt)} tokens and the limit for "
                    f"both together is {limit} ({flag}).",
                    "context_length_exceeded",
                )

    def check_cache_checkpoints(
        self, name: str, prompt: list[int], request: GenerationRequest
    ) -> None:
        """Refuse positions beyond this prompt, which the client knows by that name."""
        last = max(request.cache_checkpoints, default=0)
        if last > len(prompt):
            raise FieldError(
                "cache_checkpoints",
                f"cache_checkpoints holds position {last}, but {name} has {len(prompt)} tokens.",
            )

    def open(
        self, prefix: str, request: GenerationRequest, disconnected: Callable[[], bool]
    ) -> Generation:
        """A generation that holds one of the server's places until it is closed.

        Raises EngineUnavailable, or Overloaded when there is no place.
        """
        self._enter()
        request_id = f"{prefix}-{secrets.token_hex(16)}"
        limits = [limit for limit in (request.timeout, self.options.request_timeout) if limit]
        return Generation(
            self.client,
            self.tokenizer,
            request_id,
            request,
            disconnected=disconnected,
            on_close=self._leave,
            timeout=min(limits) if limits else None,
        )

    def health(self) -> dict[str, object]:
        """For /health; EngineUnavailable unless requests are taken."""
        engine = self.client.check()
        health: dict[str, object] = {"status": self.client.state, "engine_pid": engine.pid}
        states = self.client.states()
        return {**health, "engines": states} if len(states) > 1 else health

    def offload(self, length: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function; with a long text (`length` characters), in a native thread, so that
        this process's streams go on meanwhile. The function must touch nothing of gevent's."""
        if length < LONG_TEXT or not is_patched():
            return function(*arguments)
        import gevent

        return cast(T, gevent.get_hub().threadpool.apply(function, arguments))

    def _enter(self) -> None:
        self.client.check()
        limit = self.options.connections_a_worker
        with self._lock:
            if self._open >= limit:
                raise Overloaded(
                    f"{self._open} requests are being answered; the limit is {limit} "
                    "(--http-connections, divided by --http-workers). Try again later."
                )
            self._open += 1

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1
