"""What every route needs: the engine's client, the tokenizer, the options, and who may come in."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from megatron_hybrid.request import validate_prompt
from megatron_hybrid.server.engine_client import EngineClient
from megatron_hybrid.server.fields import FieldError
from megatron_hybrid.server.generation import Generation
from megatron_hybrid.server.metrics import ServerMetrics
from megatron_hybrid.server.openai_protocol import GenerationRequest
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.subscription import EngineUnavailable
from megatron_hybrid.tokenizer import Tokenizer

SPARE_THREADS = 4  # for /health and /metrics while every other thread is waiting for the engine


class Overloaded(RuntimeError):
    """Too many requests are waiting; the client may try again."""


class UnknownModel(LookupError):
    """The client asks for a model that is not served here."""


class Serving:
    def __init__(self, client: EngineClient, tokenizer: Tokenizer, options: ServerOptions) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.options = options
        self.metrics = ServerMetrics(self._engine_stats)
        client.observer = self.metrics
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
        validate_prompt(prompt, engine.vocab_size, engine.max_seq_length, field)
        wanted, name = request.params.max_tokens, request.max_tokens_field
        if name is not None and wanted is not None and wanted > engine.max_seq_length - len(prompt):
            raise FieldError(
                name,
                f"{name} is {wanted}, but {field} has {len(prompt)} tokens and the limit for both "
                f"together is {engine.max_seq_length} (--inference-max-seq-length).",
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
        return Generation(
            self.client,
            self.tokenizer,
            self.metrics,
            request_id,
            request,
            disconnected=disconnected,
            on_close=self._leave,
        )

    def _enter(self) -> None:
        self.client.check()
        waiting = self.client.waiting()
        if waiting >= self.options.max_queue:
            raise Overloaded(
                f"{waiting} requests are waiting; the limit is {self.options.max_queue} "
                "(--max-queue). Try again later."
            )
        limit = self.options.http_threads - SPARE_THREADS
        with self._lock:
            if self._open >= limit:
                raise Overloaded(
                    f"{self._open} requests are being answered; the limit is {limit} "
                    "(--http-threads). Try again later."
                )
            self._open += 1

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1

    def _engine_stats(self) -> dict[str, object] | None:
        try:
            return self.client.stats()
        except EngineUnavailable:
            return None
