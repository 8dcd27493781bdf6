"""The body of a request as it comes over the connection, from a client that may stall or break off.

What gunicorn raises would be a failure of the server to Flask, or no failure at all: a body that
ends early looks complete.
"""

from __future__ import annotations

from typing import Any

from gunicorn.http.errors import ParseException


class BodyStalled(Exception):
    """Nothing more of a body came for too long."""


class BodyBroken(Exception):
    """A body ended early, or its chunks are not as HTTP wants them."""


class BodyReader:
    """Takes the place of the reader in gunicorn's body of one request.

    After a failure nobody knows where the next request on the connection would begin, so it is
    closed after the answer.
    """

    def __init__(self, request: Any, patience: float) -> None:
        """request: gunicorn's; patience: the socket's timeout in seconds."""
        self._request = request
        self._reader = request.body.reader
        self._patience = patience
        self._length: int | None = getattr(self._reader, "length", None)  # None: in chunks
        self._received = 0

    def read(self, size: int) -> bytes:
        """The next bytes: `size` of them unless the body ends before.

        Raises BodyStalled or BodyBroken.
        """
        try:
            data: bytes = self._reader.read(size)
        except TimeoutError as error:
            self._request.force_close()
            raise BodyStalled(
                f"Nothing more of the body came for {self._patience:g} seconds."
            ) from error
        except (OSError, ParseException) as error:
            self._request.force_close()
            raise BodyBroken(f"The body could not be read: {error}.") from error
        self._received += len(data)
        if len(data) < size and self._length is not None and self._received < self._length:
            self._request.force_close()
            raise BodyBroken(f"The body ended after {self._received} of {self._length} bytes.")
        return data
