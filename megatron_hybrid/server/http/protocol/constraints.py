"""Which grammar the body of a request holds its answer to, whatever the client calls it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_GRAMMAR_LENGTH, Grammar
from megatron_hybrid.server.http.json_schemas import served_schema
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, read
from megatron_hybrid.server.http.protocol.requests import (
    AnswerRequest,
    GrammarFormat,
    JsonObject,
    JsonSchemaFormat,
    RegexFormat,
)
from megatron_hybrid.server.http.protocol.structural_tags import (
    MAX_FORMATS,
    HasFormat,
    StructuralTag,
    Structure,
)
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text import gbnf
from megatron_hybrid.text.grammar import check
from megatron_hybrid.text.structural_tags import MAX_DEPTH
from megatron_hybrid.values import validate_text

# Of rules and groups in a client's grammar: so deep may they stand inside each other, and five
# times as many crash llguidance.
MAX_RULES = 1000
_ANY_OBJECT = '{"type":"object"}'
# Lark as llguidance divides it, as far as it matters here.
_LARK = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*")
    |(?P<regex>/(?:\\.|[^/\\])+/)
    |(?P<special><[^<>\s]+>)
    |(?P<json>%(?:json|regex|llguidance)\s*)
    |(?P<deeper>[:(\[])""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()

T = TypeVar("T", bound=Body)
Made = Callable[[str, Any, ParseOptions], Grammar]


def grammar_of(body: AnswerRequest, options: ParseOptions) -> Grammar | None:
    """What an answer to this body has to follow; None: it is plain text. Its `field` is where it
    stands in the body.

    Raises InvalidRequestError for two of them, and for one that can't be followed, with the reason.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    if len(asked) > 1:
        one, other = asked[0][0], asked[1][0]
        raise InvalidRequestError(
            other, f"{one} and {other} both say what the answer looks like; give only one of them."
        )
    path, value, make = asked[0]
    grammar = make(path, value, options)
    check(grammar)
    return grammar


def schema_grammar(path: str, schema: dict[str, Any], options: ParseOptions) -> Grammar:
    """Of JSON that follows a schema, which stands there in the body. Raises as `grammar_of`."""
    grammar = _json_schema(path, schema, options)
    check(grammar)
    return grammar


def _asked(body: AnswerRequest) -> Iterator[tuple[str, Any, Made]]:
    """What the body asks for: where, the value, and what makes a grammar of it."""
    match body.response_format:
        case JsonObject():
            yield "response_format", None, _any_object
        case JsonSchemaFormat(json_schema=named):
            if named.schema is None:
                yield "response_format", None, _any_object
            else:
                yield "response_format.json_schema.schema", named.schema, _json_schema
        case GrammarFormat(grammar=text):
            yield "response_format.grammar", text, _grammar
        case RegexFormat(value=text):
            yield "response_format.value", text, _regex
        case StructuralTag() as asked:
            yield "response_format", asked, _structural_tag
    for kind, made in _KINDS.items():
        if (value := getattr(body, f"guided_{kind}")) is not None:
            yield f"guided_{kind}", value, made
    for name, kind in _NAMES_OF_SGLANG.items():
        if (value := getattr(body, name)) is not None:
            yield name, value, _KINDS[kind]
    if (outputs := body.structured_outputs) is not None:
        if outputs.json_object:
            yield "structured_outputs.json_object", None, _any_object
        for kind, made in _KINDS.items():
            if (value := getattr(outputs, kind)) is not None:
                yield f"structured_outputs.{kind}", value, made
        if (tag := outputs.structural_tag) is not None:
            yield "structured_outputs.structural_tag", tag, _structural_tag_in


def _any_object(path: str, value: None, options: ParseOptions) -> Grammar:
    return Grammar("json_schema", _ANY_OBJECT, path)


def _json_schema(path: str, value: dict[str, Any] | str, options: ParseOptions) -> Grammar:
    schema = _object_in(path, value) if isinstance(value, str) else value
    # What is said of OpenAI's own field names it as a whole.
    field = "response_format" if path.startswith("response_format.") else path
    return Grammar("json_schema", json.dumps(served_schema(schema, path, options)), field)


def _object_in(path: str, text: str) -> dict[str, Any]:
    """vLLM takes objects as text, too."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(path, f"{path} is text that holds no JSON object.")
    return found


def _regex(path: str, value: str, options: ParseOptions) -> Grammar:
    return Grammar("regex", value, path)


def _choice(path: str, value: Sequence[str], options: ParseOptions) -> Grammar:
    return Grammar("regex", "|".join(map(gbnf.regex_of, value)), path)


def _grammar(path: str, value: str, options: ParseOptions) -> Grammar:
    """In Lark, or in GBNF."""
    validate_text(path, value, MAX_GRAMMAR_LENGTH)
    try:
        text = gbnf.lark_of(value) if gbnf.is_gbnf(value) else value
    except ValueError as error:
        reason = f"{path} holds a grammar that can't be served: {error}."
        raise InvalidRequestError(path, reason) from error
    return Grammar("lark", _bounded(text, path, options), path)


def _bounded(text: str, path: str, options: ParseOptions) -> str:
    """The grammar with its JSON schemas as they are served. Raises InvalidRequestError where rules
    and groups could lead too deep."""
    written: list[str] = []
    at = deeper = 0
    while (found := _LARK.search(text, at)) is not None:
        written.append(text[at : found.end()])
        at = found.end()
        if found.lastgroup == "deeper":
            deeper += 1
        elif found.lastgroup == "json":
            value, at = _json_at(text, at, path)
            if found[0].startswith("%json") and isinstance(value, dict):
                value = served_schema(value, path, options)
            written.append(json.dumps(value))
    if deeper > MAX_RULES:
        raise InvalidRequestError(
            path, f"{path} has {deeper} rules and groups; the limit is {MAX_RULES}."
        )
    return "".join([*written, text[at:]])


def _json_at(text: str, at: int, path: str) -> tuple[Any, int]:
    """The JSON that begins there, and where it ends."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        line = text.count("\n", 0, at) + 1
        raise InvalidRequestError(
            path, f"{path} holds a grammar that can't be served: no JSON follows in line {line}."
        ) from error


def _structural_tag_in(path: str, value: dict[str, Any] | str, options: ParseOptions) -> Grammar:
    found = _object_in(path, value) if isinstance(value, str) else value
    tag = _read_in(f"{path}.", StructuralTag, {"type": "structural_tag", **found}, options)
    return _structural_tag(path, tag, options)


def _read_in(path: str, kind: type[T], values: dict[str, Any], options: ParseOptions) -> T:
    """A part of the body, which stands there, as that structure. What is wrong with it is no matter
    of the body's own shape."""
    try:
        return read(kind, values, options)
    except InvalidRequestError as error:
        if error.field == "body":
            raise
        name = path + error.field
        raise InvalidRequestError(name, str(error).replace(error.field, name, 1)) from error


def _structural_tag(path: str, tag: StructuralTag, options: ParseOptions) -> Grammar:
    """In either of its shapes, of which the older one says the same as triggered_tags."""
    if (tag.format is None) == (tag.structures is None and tag.triggers is None):
        raise InvalidRequestError(
            path, f"{path} holds a structural tag, which needs either format or structures."
        )
    if tag.format is not None:
        form = _read_in(f"{path}.", HasFormat, {"format": tag.format}, options).format
        path = f"{path}.format"
        written = _Formats(path, options).written(form, path)
    else:
        path = f"{path}.structures"
        tags = [
            _older_tag(f"{path}[{number}].schema", one, options)
            for number, one in enumerate(tag.structures or ())
        ]
        written = {"type": "triggered_tags", "triggers": tag.triggers or [], "tags": tags}
    return Grammar("structural_tag", json.dumps(written), path)


def _older_tag(path: str, one: Structure, options: ParseOptions) -> dict[str, Any]:
    """As the newer shape has it; its schema stands there."""
    schema = json.loads(_json_schema(path, one.schema, options).text)
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": one.begin, "content": content, "end": one.end}


class _Formats:
    """Formats of one structural tag as they are served: with schemas as others, and grammars in
    Lark."""

    def __init__(self, path: str, options: ParseOptions) -> None:
        """path: where they stand in the body."""
        self._path = path
        self._options = options
        self._count = 0

    def written(self, form: Body, path: str, depth: int = 0) -> dict[str, Any]:
        """The format, which stands there in the body, as text/structural_tags.py knows it."""
        self._count += 1
        if self._count > MAX_FORMATS or depth > MAX_DEPTH:
            raise InvalidRequestError(
                self._path,
                f"{self._path} has too many formats; the limit is {MAX_FORMATS}, and {MAX_DEPTH} "
                "inside each other.",
            )
        served: dict[str, Any] = {"type": form.__struct_config__.tag}
        for name in form.__struct_fields__:
            here, value = f"{path}.{name}", getattr(form, name)
            if name == "json_schema":
                value = served_schema(value, here, self._options)
            elif name == "grammar":
                value = _grammar(here, value, self._options).text
            elif isinstance(value, Body):
                value = self.written(value, here, depth + 1)
            elif name in ("elements", "tags"):
                value = [
                    self.written(one, f"{here}[{number}]", depth + 1)
                    for number, one in enumerate(value)
                ]
            if value is not None and not isinstance(value, Unsupported):
                served[name] = value
        return served


_NAMES_OF_SGLANG = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_KINDS: dict[str, Made] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
