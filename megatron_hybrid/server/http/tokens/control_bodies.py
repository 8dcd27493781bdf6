"""The bodies of what trainers ask besides answers."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.server.http.protocol.parsing import Body
from megatron_hybrid.server.http.protocol.tools import Name


class AbortRequestBody(Body):
    """Of /abort_request, as SGLang has it.

    rid: What the client calls the request, or the `id` of an answer.
    abort_all: End every answer, whoever asked for it.
    abort_message: Changes nothing.
    finished_reason: Changes nothing.
    """

    rid: Name | None = ""
    abort_all: bool | None = False
    abort_message: Name | None = None
    finished_reason: dict[str, Any] | None = None
