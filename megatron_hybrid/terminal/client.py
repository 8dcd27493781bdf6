"""A server's two routes that a chat needs, over urllib."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.keys import API_KEY_VARIABLE
from megatron_hybrid.server.options import is_loopback

ASKING_SECONDS = 10.0  # for an answer that needs no model
SILENT_SECONDS = 3600.0  # a request may wait in the queue, and long prompts take their time
MOST_ERROR_BYTES = 2**16


class ServerError(Exception):
    """The server can't be reached, or refused, or broke off; the message is a sentence."""


class Delta(msgspec.Struct):
    """What a chunk adds to the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it


class Choice(msgspec.Struct):
    """Of a chunk; a chat asks for one."""

    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    """Of usage."""

    cached_tokens: int | None = None


class AnswerDetails(msgspec.Struct):
    """Of usage."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens; None is what the server does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None


class Failure(msgspec.Struct):
    """OpenAI's error object."""

    message: str = ""


class Chunk(msgspec.Struct):
    """What we read of an event of a stream, or of an error's body."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | None = None


class Server:
    """Raises ServerError from every call."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: with or without /v1 at its end. ConfigurationError for what is no address, and for a
        key that can't be sent."""
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            host, _ = urlsplit(url).hostname, urlsplit(url).port
        except ValueError:
            host = None
        if not host or not url.startswith(("http://", "https://")) or "@" in url:
            raise ConfigurationError(f"--url is {url!r}; it must be like http://127.0.0.1:5000.")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
                raise ConfigurationError(
                    "The key (--api-key) can't be sent in a header: it takes letters, digits and "
                    "signs of ASCII, and no spaces."
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy of the environment has no part in what stays on this machine.
        proxies = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
        self._opener = urllib.request.build_opener(*proxies, _NoRedirects())

    def model(self) -> str:
        """The name of the model that is served; the first, if there are several."""
        with self._open("/v1/models", None, ASKING_SECONDS) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self.url}/v1/models does not say what is served.") from None
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"{self.url} {_broke(error)}.") from None

    def answer(self, body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """The chunks of a chat's streamed answer. Closing the iterator hangs up, which ends the
        request in the server."""
        with self._open("/v1/chat/completions", body, SILENT_SECONDS) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue  # an empty line, or a comment
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    chunk = msgspec.json.decode(data, type=Chunk)
                    if chunk.error is not None:
                        raise ServerError(chunk.error.message or "The answer broke off.")
                    yield chunk
            except msgspec.MsgspecError:
                raise ServerError(f"{self.url} sent what is no stream of a chat.") from None
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"The answer broke off: {self.url} {_broke(error)}.") from None
        raise ServerError(f"The answer broke off: {self.url} closed the connection.")

    def _open(self, path: str, body: Any, seconds: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            raise ServerError(self._refusal(error)) from None
        except urllib.error.URLError as error:
            raise ServerError(
                f"No server answers at {self.url}: {_words(error.reason)}. `megatron-hybrid serve` "
                "starts one, --url names another."
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} {_broke(error)}.") from None

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        said = f"{self.url} answered with status {error.code} ({error.reason})."
        with suppress(msgspec.MsgspecError, OSError, http.client.HTTPException):
            failure = msgspec.json.decode(error.read(MOST_ERROR_BYTES), type=Chunk).error
            said = failure.message if failure is not None and failure.message else said
        if error.code == 401:
            said += f" --api-key, or {API_KEY_VARIABLE}, has the key that is sent."
        return said


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Which would take the key along to another server."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _broke(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "said nothing for too long"
    return f"closed the connection ({_words(error)})"


def _words(reason: Any) -> str:
    said = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return said.rstrip(".") or type(reason).__name__
