"""What one model makes of tools: how its calls are read, and how an answer is held to them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.server.http.protocol.complaints import FieldError
from megatron_hybrid.server.http.protocol.tools import Tools
from megatron_hybrid.server.http.tool_calls.formats import (
    NAMES,
    Schemas,
    choose_format,
    marks_that_are_special,
)
from megatron_hybrid.server.http.tool_calls.grammars import Choices, calls_grammar
from megatron_hybrid.server.http.tool_calls.reader import ToolCallReader, read_answer
from megatron_hybrid.text import grammar as grammars
from megatron_hybrid.text.tokenizer import Message, Tokenizer

logger = logging.getLogger(__name__)

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class ToolCalling:
    """parser: a format's name, or "auto": the one that the chat template shows."""

    def __init__(self, tokenizer: Tokenizer, parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._format = choose_format(tokenizer, parser)
        if self._format is None and parser != "auto":
            raise ConfigurationError(
                f"--tool-call-parser is {parser!r}; it must be auto or one of {', '.join(NAMES)}."
            )
        if self._format is None and tokenizer.takes_tools:
            logger.warning(
                "The chat template takes tools, but not in a format that is known here: calls stay "
                "text unless --tool-call-parser names one of %s.",
                ", ".join(NAMES),
            )
        # Ids that an answer's text shows though they are special, since the reader needs them.
        self.visible_ids: frozenset[int] = frozenset()
        if self._format is not None:
            self.visible_ids = marks_that_are_special(self._format, tokenizer)

    def check(self, tools: Tools) -> None:
        """Refuse functions for a model that has no place for them."""
        if tools.descriptions and not self._tokenizer.takes_tools:
            raise FieldError(
                "tools",
                "This model's chat template has no place for tools; leave tools out.",
                "unsupported_parameter",
            )

    def params(self, tools: Tools, params: SamplingParams) -> SamplingParams:
        """With the grammar that a forced or strict call asks for.

        Raises InvalidRequestError where that cannot be.
        """
        self.check(tools)
        grammar = self._grammar(tools, params.grammar)
        return params if grammar is None else dataclasses.replace(params, grammar=grammar)

    def reader(self, tools: Tools) -> ToolCallReader | None:
        """For one answer; None if its text is all there is to it."""
        if self._format is None or not tools.read:
            return None
        return ToolCallReader(self._format, tools.schemas)

    def says_the_same(self, schemas: Schemas, text: str, message: Message) -> bool:
        """Whether an answer in the model's words is this message with its calls."""
        if self._format is None:
            return False
        content, calls = read_answer(self._format, schemas, text)
        given = [call["function"] for call in message.get("tool_calls", ())]
        return content.strip() == message["content"].strip() and [
            (call.name, call.arguments) for call in calls
        ] == [(function["name"], function["arguments"]) for function in given]

    def _grammar(self, tools: Tools, other: Grammar | None) -> Grammar | None:
        constrained = tools.forced or (
            tools.read and (tools.strict or not tools.several or other is not None)
        )
        if not constrained:
            return None
        if self._format is None:
            raise FieldError(
                "tools",
                "How this model writes tool calls is not known, so that its answer can't be held "
                "to them; the server's --tool-call-parser names a format.",
                "unsupported_parameter",
            )
        if other is not None and (tools.forced or other.kind != "json_schema"):
            raise FieldError(
                "response_format", "response_format does not go with a tool_choice that forces one."
            )
        names = [tools.choice] if tools.named else list(tools.schemas)
        schemas = {
            name: tools.schemas[name] if name in tools.held else _ANY_OBJECT for name in names
        }
        choices = Choices(
            schemas,
            several=tools.several and not tools.named,
            text=not tools.forced and other is None,
            otherwise=None if other is None else other.text,
        )
        grammar = calls_grammar(self._format, self._tokenizer, choices)
        _check(grammar, tools)
        return grammar


def _check(grammar: Grammar, tools: Tools) -> None:
    """Refuse what can't be served, by the name of the function whose schema it is."""
    try:
        grammars.check(grammar, "tools")
    except InvalidRequestError:
        for number, (name, schema) in enumerate(tools.schemas.items()):
            if name in tools.held:
                path = f"tools[{number}].function.parameters"
                grammars.check(Grammar("json_schema", json.dumps(schema)), path)
        raise
