"""The queries of the routes that read stored responses."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from megatron_hybrid.server.http.protocol.parsing import Body, only
from megatron_hybrid.server.http.protocol.responses import Include

MOST_LISTED = 100
DEFAULT_LISTED = 20
MAX_ID_LENGTH = 256  # in an address, which can't be long
_OnlyFalse = only("false")  # a response is given as a whole


class RetrieveQuery(Body):
    """Of GET /v1/responses/{id}.

    include: Changes nothing: all that there is is given.
    include_obfuscation: Changes nothing: it belongs to streams.
    """

    stream: _OnlyFalse | None = None
    include: list[Include] | None = None
    include_obfuscation: bool | None = None


class InputItemsQuery(Body):
    """Of GET /v1/responses/{id}/input_items.

    limit: How many items are given at most.
    order: desc: the newest first.
    after: Only items that come after the one with this id.
    include: Changes nothing: all that there is is given.
    """

    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] | None = DEFAULT_LISTED
    order: Literal["asc", "desc"] | None = "desc"
    after: Annotated[str, Meta(max_length=MAX_ID_LENGTH)] | None = None
    include: list[Include] | None = None
