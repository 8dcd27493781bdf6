"""What one model makes of tools: how its calls are read, and how an answer is held to them, by a
grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.server.http.json_schemas import with_definitions
from megatron_hybrid.server.http.protocol.tools import Tools
from megatron_hybrid.server.http.tool_calls.formats import (
    NAMES,
    Schemas,
    ToolFormat,
    choose_format,
    is_string,
    marks_that_are_special,
    read_json,
    read_python,
    read_xml,
)
from megatron_hybrid.server.http.tool_calls.reader import ToolCallReader, read_answer
from megatron_hybrid.text import grammar as grammars
from megatron_hybrid.text.tokenizer import Message, Tokenizer

logger = logging.getLogger(__name__)

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# No free white space: small models would never end it.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
        if tools.descriptions:
            self._tokenizer.check_tools()

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
        return ToolCallReader(self._format, tools.callable)

    def says_the_same(self, schemas: Schemas, message: Message, text: str) -> bool:
        """Whether an answer in the model's words is this message with its calls."""
        if self._format is None:
            return False
        content, calls = read_answer(self._format, schemas, text)
        given = [call["function"] for call in message.get("tool_calls", ())]
        return content.strip() == message["content"].strip() and [
            (call.name, call.arguments) for call in calls
        ] == [(function["name"], function["arguments"]) for function in given]

    def _grammar(self, tools: Tools, other: Grammar | None) -> Grammar | None:
        some = tools.strict or not tools.several or tools.allowed is not None
        constrained = tools.forced or (tools.read and (some or other is not None))
        if not constrained:
            return None
        if self._format is None:
            raise InvalidRequestError(
                "tools",
                "How this model writes tool calls is not known, so that its answer can't be held "
                "to them; the server's --tool-call-parser names a format.",
                code="unsupported_parameter",
            )
        if other is not None and (tools.forced or other.kind != "json_schema"):
            raise InvalidRequestError(
                "response_format", "response_format does not go with a tool_choice that forces one."
            )
        names = [tools.choice] if tools.named else list(tools.callable)
        schemas = {
            name: tools.schemas[name] if name in tools.held else _ANY_OBJECT for name in names
        }
        allowed = Allowed(
            schemas,
            several=tools.several and not tools.named,
            text=not tools.forced and other is None,
            otherwise=None if other is None else other.text,
        )
        grammar = calls_grammar(self._format, self._tokenizer, allowed)
        _check(grammar, tools)
        return grammar


def _check(grammar: Grammar, tools: Tools) -> None:
    """Refuse what can't be served, by the name of the function whose schema it is."""
    try:
        grammars.check(grammar, "tools")
    except InvalidRequestError:
        for number, (name, schema) in enumerate(tools.schemas.items()):
            if name in tools.held:
                path = tools.fields.parameters.format(number)
                grammars.check(Grammar("json_schema", json.dumps(schema)), path)
        raise


@dataclass(frozen=True, slots=True)
class Allowed:
    """What an answer may be: calls of these functions (by name, the schema of their arguments),
    only one of them unless `several`; with `text`, also text before, between and after them;
    `otherwise`: or, without calls, JSON of this schema."""

    schemas: Schemas
    several: bool
    text: bool = False
    otherwise: str | None = None


def calls_grammar(form: ToolFormat, tokenizer: Tokenizer, allowed: Allowed) -> Grammar:
    """The grammar of answers that `form` reads as what is `allowed`."""
    call = _WRITTEN[form.read]
    calls = [call(form, name, schema) for name, schema in allowed.schemas.items()]
    begin, end = _mark(form.begin, tokenizer), _mark(form.end, tokenizer)
    rules = [f"call: {' | '.join(calls)}"]
    if form.listed:
        body = f'"[" {_several("call", ", ", allowed)} "]" {end}'
        start = f"{begin} body"
    elif form.end:
        body = f'"\\n" call "\\n" {end}'
        start = _several(f"{begin} body", "\n", allowed)
    else:
        body = start = _several("call", "; ", allowed)
    rules.append(f"body: {body}")
    if allowed.text:
        rules += _among_text(form, begin, allowed)
    elif allowed.otherwise is not None:
        rules.append(f"start: {start} | {_json(json.loads(allowed.otherwise))}")
    else:
        rules.append(f"start: {start}")
    return Grammar("lark", "\n".join([*rules, _STRING]) + "\n", "tools")


def _several(one: str, separator: str, allowed: Allowed) -> str:
    return f"{one} ({_quoted(separator)} {one})*" if allowed.several else one


def _among_text(form: ToolFormat, begin: str, allowed: Allowed) -> list[str]:
    """Rules of answers that may be text, or have it around their calls."""
    if not form.end:  # the whole answer is a call, or does not begin like one
        return ["start: body | text", "text: /([^{](.|\\n)*)?/"]
    text = "text: /(.|\\n)*/"
    if begin.startswith('"'):
        # Lazy: it ends with the first mark, so text never holds one.
        marked = [text, f"opened[lazy]: /(.|\\n)*/ {begin}"]
    else:
        marked = [text, f"opened: text {begin}"]
    start = "start: (opened body)* text" if allowed.several else "start: opened body | text"
    return [start, *marked]


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """An added token by its id, anything else as text."""
    token_id = tokenizer.token_id(mark)
    if token_id is not None and tokenizer.is_added(token_id):
        return f"<[{token_id}]>"
    return _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _json(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """JSON of a schema, or of a part of `root`, to which it may refer."""
    whole = schema if root is None else with_definitions(schema, root)
    plain = whole if isinstance(whole, Mapping) else {}
    return f"%json {json.dumps({**plain, 'x-guidance': _JSON_STYLE})}"


def _json_call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> str:
    begin = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
    return f'{_quoted(begin)} {_json({"type": "object", **schema})} "}}"'


def _python_call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"{_quoted(key + '=')} {_json(value, schema)}"

    comma = _quoted(", ")
    items = _parameters(schema)
    first = next((number for number, one in enumerate(items) if one.required), None)
    written = [argument(one.name, one.schema) for one in items]
    if first is not None:
        before = "".join(f"({one} {comma})? " for one in written[:first])
        given = before + written[first]
        for one, text in zip(items[first + 1 :], written[first + 1 :], strict=True):
            given += f" {comma} {text}" if one.required else f" ({comma} {text})?"
    elif written:  # the first one that is given has no comma before it
        begins = (
            one + "".join(f" ({comma} {later})?" for later in written[number + 1 :])
            for number, one in enumerate(written)
        )
        given = f"({' | '.join(begins)})?"
    else:
        given = ""
    return f'{_quoted(name + "(")} {given} ")"'


# A value in XML ends where the parameter does, whatever it holds.
_END_OF_VALUE = "\n</parameter>\n"
_STRING = f"string[lazy]: /(.|\\n)*/ {_quoted(_END_OF_VALUE)}"


def _xml_call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        begin = _quoted(f"<parameter={key}>\n")
        texts = value.get("enum", []) if isinstance(value, Mapping) else []
        if texts and is_string(value):
            ended = " | ".join(_quoted(text + _END_OF_VALUE) for text in texts)
            return f"{begin} ({ended})"
        if isinstance(value, Mapping) and is_string(value):
            return f"{begin} string"
        return f"{begin} {_json(value, schema)} {_quoted(_END_OF_VALUE)}"

    given = []
    for one in _parameters(schema):
        text = parameter(one.name, one.schema)
        given.append(text if one.required else f"({text})?")
    return " ".join([_quoted(f"<function={name}>\n"), *given, _quoted("</function>")])


class _Parameter(NamedTuple):
    name: str
    schema: Any
    required: bool


def _parameters(schema: Mapping[str, Any]) -> list[_Parameter]:
    """In the schema's order."""
    properties = schema.get("properties")
    required = schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return []
    return [_Parameter(name, value, name in required) for name, value in properties.items()]


_WRITTEN: dict[Any, Callable[[ToolFormat, str, Mapping[str, Any]], str]] = {
    read_json: _json_call,
    read_xml: _xml_call,
    read_python: _python_call,
}
