"""The content of a chat's message: one string, whichever way a client gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_hybrid.errors import InvalidRequestError


def with_plain_content(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one string; parts that are not text are refused by name."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    name = f"messages[{index}].content"
    if not isinstance(content, list):
        shown = json.dumps(content, default=repr)[:60]
        raise InvalidRequestError(name, f"{name} is {shown}; it must be text or a list of parts.")
    texts = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{name}[{position}].type",
                f"{name}[{position}].type is {kind!r}; only 'text' is supported.",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{name}[{position}].text", f"{name}[{position}].text is missing or not a string."
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
