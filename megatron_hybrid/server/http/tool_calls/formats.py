"""How models write tool calls: marks around a body, and how a body is read."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_hybrid.text.tokenizer import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]  # by function: JSON Schema of its arguments


class Call(NamedTuple):
    """`arguments`: by the parameters' names."""

    name: str
    arguments: dict[str, Any]


class NotACall(ValueError):
    """Text between the marks that is no call; `may_go_on`: more text could still make it one."""

    def __init__(self, may_go_on: bool = False) -> None:
        super().__init__("no call")
        self.may_go_on = may_go_on


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """name: for --tool-call-parser. begin, end: the marks around a body; without an end mark the
    body reaches to the answer's end, and `begin` counts at the answer's beginning only.
    read: the calls of a body, of whatever functions; raises NotACall.
    sign: what is found (a regular expression) in the chat templates of models that write calls so,
    unless it is the begin mark.
    arguments_key: the name of a JSON call's arguments. listed: a body is a list of calls.
    """

    name: str
    begin: str
    end: str
    read: Callable[[str, Schemas], list[Call]]
    sign: str = ""
    arguments_key: str = "arguments"
    listed: bool = False

    def calls(self, body: str, schemas: Schemas) -> list[Call]:
        """The calls of a body; raises NotACall, also for a function that nobody described."""
        calls = self.read(body, schemas)
        if any(call.name not in schemas for call in calls):
            raise NotACall
        return calls


def read_json(body: str, schemas: Schemas) -> list[Call]:
    """An object with name and arguments, a list of such, or several with ; between them."""
    decoder = json.JSONDecoder(strict=False)
    calls, rest = [], body.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            calls += [_json_call(one) for one in (value if isinstance(value, list) else [value])]
            rest = rest[end:].lstrip(" \n;,")
    except json.JSONDecodeError as error:
        raise NotACall("Unterminated string" in error.msg) from error
    except RecursionError as error:
        raise NotACall from error
    if not calls:
        raise NotACall
    return calls


def _json_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NotACall
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise NotACall
    return Call(value["name"], arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def read_xml(body: str, schemas: Schemas) -> list[Call]:
    """<function=name>, and in it <parameter=name> with each value on lines of its own. Values are
    strings unless the function's schema says otherwise and they are JSON."""
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise NotACall("</function>" not in body)
    name, rest = function.groups()
    properties = schemas.get(name, {}).get("properties")
    arguments: dict[str, Any] = {}
    while rest.strip():
        parameter = _PARAMETER.match(rest)
        if parameter is None:
            raise NotACall("</parameter>" not in rest)
        key, value = parameter.groups()
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _typed(value, schema)
        rest = rest[parameter.end() :]
    return [Call(name, arguments)]


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or is_string(schema):
        return value
    text = value.strip()
    try:
        typed = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return value
    # "5" stays text where the schema lets text in.
    if "string" in json_types(schema) and not isinstance(typed, str) and typed is not None:
        named = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
        kind = named[type(typed)]
        if kind not in json_types(schema) and not (
            kind == "integer" and "number" in json_types(schema)
        ):
            return value
    return typed


def json_types(schema: Mapping[str, Any]) -> list[Any]:
    """What `type` allows; [None] where it says nothing."""
    kind = schema.get("type")
    return kind if isinstance(kind, list) else [kind]


def is_string(schema: Mapping[str, Any]) -> bool:
    """Whether the schema lets nothing in but strings."""
    values = schema.get("enum")
    if "type" not in schema and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return json_types(schema) == ["string"]


def read_python(body: str, schemas: Schemas) -> list[Call]:
    """A Python list of calls with keyword arguments that are literals."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except SyntaxError as error:
        raise NotACall("unterminated" in str(error.msg)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotACall from error
    calls = [_python_call(one) for one in (tree.elts if isinstance(tree, ast.List) else [tree])]
    if not calls:
        raise NotACall
    return calls


def _python_call(node: ast.expr) -> Call:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # hyphens in the name
        name, arguments = _python_call(node.right)
        return Call(f"{ast.unparse(node.left).replace(' ', '')}-{name}", arguments)
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NotACall
        arguments[keyword.arg] = _literal(keyword.value)
    return Call(ast.unparse(node.func), arguments)


_NAMES = {"true": True, "false": False, "null": None}  # as in JSON


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str(text)):
            # JSON writes characters beyond U+FFFF as two escapes.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _literal(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise NotACall
            return dict(zip(names, map(_literal, values), strict=True))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise NotACall


# The first one whose sign a template holds is taken.
FORMATS = (
    # LFM2
    ToolFormat("pythonic", "<|tool_call_start|>", "<|tool_call_end|>", read_python, listed=True),
    # Nemotron-H
    ToolFormat("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", read_json, listed=True),
    # Jamba
    ToolFormat("jamba", "<tool_calls>", "</tool_calls>", read_json, listed=True),
    # Qwen3.5, Nemotron 3
    ToolFormat("xml", "<tool_call>", "</tool_call>", read_xml, "<function="),
    # Qwen3, Qwen3-Next, Granite 4, Falcon-H1
    ToolFormat("hermes", "<tool_call>", "</tool_call>", read_json),
    # Llama 3.1
    ToolFormat(
        "llama3_json", "{", "", read_json, r'"parameters"\s*:|<\|python_tag\|>', "parameters"
    ),
)
NAMES = tuple(form.name for form in FORMATS)


def choose_format(tokenizer: Tokenizer, name: str = "auto") -> ToolFormat | None:
    """The format by its name, or the one that the chat template shows; None if it shows none."""
    for form in FORMATS:
        sign = form.sign or re.escape(form.begin)
        if name == form.name or name == "auto" and re.search(sign, tokenizer.chat_template):
            return form
    return None


def marks_that_are_special(form: ToolFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of marks that are special tokens, which an answer's text would not show."""
    ids = [tokenizer.token_id(mark) for mark in (form.begin, form.end) if mark]
    return frozenset(one for one in ids if one is not None and tokenizer.is_special(one))
