"""Errors that users see. Every message is a sentence for the person who can act on it."""

from __future__ import annotations

from typing import Any


class ConfigurationError(ValueError):
    """The configuration contradicts itself, the model or the machine. Command lines exit with 2."""


class RequestError(Exception):
    """What ends one request, and only that one. For its client: the HTTP status, and of OpenAI's
    error object the type (`kind`), the code and the field (`param`)."""

    status: int = 500
    kind: str = "server_error"
    code: str | None = None
    field: str | None = None


class InvalidRequestError(RequestError, ValueError):
    """A request that cannot be served as it stands.

    `field` names the request field that is wrong, `code` is OpenAI's word for the way in which it
    is, `status` the HTTP status that says so: 413 if prompt and answer are too long for the model.
    """

    kind = "invalid_request_error"
    field: str

    def __init__(self, field: str, message: str, status: int = 400, code: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code or ("context_length_exceeded" if status == 413 else "invalid_value")

    def __reduce__(self) -> tuple[Any, ...]:  # it may come from another process
        return type(self), (self.field, str(self), self.status, self.code)


class WeightsError(ValueError):
    """A checkpoint that does not fit its configuration; the message names the weight."""


class SleepError(RuntimeError):
    """The engine sleeps, or can't go to sleep or wake up; nothing is computed meanwhile."""


class KVBlocksExhausted(RuntimeError):
    """No KV block is free or evictable."""


class StatePoolExhausted(RuntimeError):
    """Every state slot is in use."""


class DeviceLostError(RuntimeError):
    """The device can't compute any more; the process has to end."""


class WeightsLostError(DeviceLostError):
    """New weights were copied only in part: the process has to be started again."""


class StoreError(RuntimeError):
    """What lies outside of the process could not be read or written; for the log."""
