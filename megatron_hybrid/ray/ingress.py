"""The routes of our server in front of all replicas: Ray's proxies send requests here."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import grpc
from ray.exceptions import RayActorError, RayError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from megatron_hybrid.ray.failures import broken_stream, failed
from megatron_hybrid.ray.messages import MOST_BYTES, Asked, Head, Whole
from megatron_hybrid.ray.process import HOST
from megatron_hybrid.ray.routes import as_one, asks_all, is_control

ALL_SECONDS = 600.0  # new weights take long
# Of Ray, of its gRPC, and of a replica whose server does not answer.
NO_ANSWER = (RayError, grpc.RpcError, ConnectionError)

logger = logging.getLogger(__name__)


class Ingress:
    """Takes a request, and gives the answer of the replica that our router chooses, or of all.

    controls: whether the routes that stop the engines are served.
    """

    def __init__(self, replicas: Any, *, controls: bool, keeps_host: bool) -> None:
        # In this loop: a thread of its own would be woken for each item.
        replicas._init(_run_router_in_separate_loop=False)
        self._replicas = replicas
        # By gRPC: an item takes a third less than through Ray's object store.
        self._streams = replicas.options(stream=True, _by_reference=False)
        self._large = replicas.options(stream=True, _by_reference=True)
        self._controls = controls
        self._keeps_host = keeps_host
        self._name = secrets.token_hex(6)
        self._numbers = itertools.count()

    async def __call__(self, request: Request) -> Response:
        """The answer; of a stream, its events as they come."""
        asked = await self._read(request)
        if is_control(asked.route) and not self._controls:
            return _response(failed(404, f"{asked.route} is not served (--enable-control-routes)."))
        try:
            if asks_all(asked.route):
                return _response(await self._ask_all(asked))
            return await self._forward(asked)
        except NO_ANSWER as error:
            logger.warning("A replica did not answer: %r", error)
            return _response(failed(503, _gone(error)))

    async def _read(self, request: Request) -> Asked:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        if query := request.url.query:
            path = f"{path}?{query}"
        headers = {name.lower(): value for name, value in request.headers.items()}
        if not self._keeps_host:
            host, headers["host"] = headers.get("host"), HOST
            # A page of this address's own is one of the server's own.
            if (origin := headers.get("origin")) and urlsplit(origin).netloc == host:
                headers["origin"] = f"http://{HOST}"
        return Asked(
            f"{self._name}-{next(self._numbers)}",
            request.method,
            path,
            headers,
            await request.body(),
        )

    async def _ask_all(self, asked: Asked) -> Whole:
        answers = await self._replicas.broadcast("call", asked).results_async(timeout_s=ALL_SECONDS)
        return as_one(asked.route, list(answers))

    async def _forward(self, asked: Asked) -> Response:
        streams = self._streams if len(asked.body) <= MOST_BYTES else self._large
        chunks = streams.forward.remote(asked)
        try:
            head: Head = await anext(chunks)
            if not head.is_stream:
                body = head.body + b"".join([chunk async for chunk in chunks])
                return _response(Whole("", head.status, head.headers, body))
        except BaseException:  # the client has gone, or the replica
            chunks.cancel()
            raise
        answer = StreamingResponse(self._events(asked, chunks), head.status)
        _set_headers(answer, head.headers)
        return answer

    async def _events(self, asked: Asked, chunks: Any) -> AsyncGenerator[bytes, None]:
        """Until the end, or the client's."""
        has_ended = False
        try:
            async for chunk in chunks:
                yield chunk
            has_ended = True
        except NO_ANSWER as error:
            has_ended = True
            logger.warning("A replica broke off: %r", error)
            yield broken_stream(asked.route, _gone(error))
        finally:
            if not has_ended:
                chunks.cancel()


def _gone(error: Exception) -> str:
    what = "died" if isinstance(error, RayActorError) else "failed"
    return f"The replica that had the request has {what}. Try again."


def _response(answer: Whole) -> Response:
    response = Response(answer.body, answer.status)
    _set_headers(response, answer.headers)
    return response


def _set_headers(response: Response, headers: list[tuple[str, str]]) -> None:
    for name, value in headers:
        response.headers.append(name, value)
