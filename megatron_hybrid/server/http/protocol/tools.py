"""What a request says of tools: `tools`, `tool_choice`, `parallel_tool_calls`, and in messages the
calls that were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_NAME_LENGTH
from megatron_hybrid.server.http.json_schemas import served_schema
from megatron_hybrid.server.http.protocol.parsing import (
    BY_DEFAULT,
    Body,
    JsonSchema,
    Own,
    show,
)
from megatron_hybrid.server.options import ParseOptions

MAX_TOOLS = 128
MAX_DESCRIPTION_LENGTH = 65_536
MAX_ARGUMENTS_LENGTH = 2**24
MAX_INDEX = 100_000
_NO_PARAMETERS: JsonSchema = {"type": "object", "properties": {}}  # what is meant by leaving out

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}\Z")]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_LENGTH)]
Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
AnyObject = dict[str, Any]


class Marked(Body):
    """With what clients add to messages, their parts and tools for other servers' caches.

    cache_control: Changes nothing: what is cached is found by itself.
    prompt_cache_breakpoint: Changes nothing: what is cached is found by itself.
    """

    cache_control: AnyObject | None = None
    prompt_cache_breakpoint: AnyObject | None = None


class Repeated(Body):
    """With what clients keep of other servers' answers, and send back.

    provider_specific_fields: Changes nothing.
    extra_content: Changes nothing.
    """

    provider_specific_fields: AnyObject | None = None
    extra_content: AnyObject | None = None


class Function(Marked, kw_only=True):
    """A function that the answer may call.

    parameters: JSON Schema of the arguments.
    strict: The arguments always match their schema.
    """

    name: FunctionName
    description: Description | None = None
    parameters: AnyObject | None = None
    strict: bool | None = False


class Tool(Marked, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name in `tool_choice`."""

    name: FunctionName


class ToolChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
AnyToolChoice = Literal["none", "auto", "required"] | ToolChoice | None


class Arguments(Own):
    """A JSON object in a string."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @classmethod
    def read(cls, value: Any) -> Arguments:
        if not isinstance(value, str) or len(value) > MAX_ARGUMENTS_LENGTH:
            rule = f"a string of at most {MAX_ARGUMENTS_LENGTH} characters"
            raise ValueError(f"is {show(value)}; it must be {rule}.", "invalid_type")
        try:
            values = json.loads(value or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError(f"is {show(value)}; it must be a JSON object in a string.")
        return cls(values)

    @classmethod
    def schema(cls) -> JsonSchema:
        return {
            "type": "string",
            "maxLength": MAX_ARGUMENTS_LENGTH,
            "description": "A JSON object in a string.",
        }


class CalledFunction(Repeated, kw_only=True):
    """A function that was called."""

    name: FunctionName
    arguments: Arguments | None = None


class Call(Repeated, kw_only=True):
    """A call in an assistant's message."""

    type: Literal["function"]
    function: CalledFunction
    id: Name | None = None
    # Of streamed answers, which clients put together.
    index: Annotated[int, Meta(ge=0, le=MAX_INDEX)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates want it."""
        arguments = self.function.arguments
        function = {
            "name": self.function.name,
            "arguments": {} if arguments is None else arguments.values,
        }
        return {"id": self.id or "", "type": "function", "function": function}


class ToolFields(NamedTuple):
    """What a client calls the parts of a function, {} being its number, and the name of the one
    that has to be called."""

    name: str = "tools[{}].function.name"
    parameters: str = "tools[{}].function.parameters"
    chosen: str = "tool_choice.function.name"


IN_CHATS = ToolFields()


@dataclass(frozen=True, slots=True)
class Tools:
    """descriptions: the functions, for the chat template. schemas: of their arguments, by name, as
    answers are held to them. strict: names of those whose arguments must match their schema.
    choice: none, auto, required, or the name of the one that must be called (`named`). several:
    more than one call is fine. fields: for what is said of them. allowed: only these of the
    functions may be called; None: all.
    """

    descriptions: list[dict[str, Any]] = field(default_factory=list)
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    choice: str = "none"
    named: bool = False
    several: bool = True
    fields: ToolFields = IN_CHATS
    allowed: frozenset[str] | None = None

    @property
    def callable(self) -> dict[str, dict[str, Any]]:
        """The schemas of those that may be called."""
        allowed = self.allowed
        return {
            name: schema
            for name, schema in self.schemas.items()
            if allowed is None or name in allowed
        }

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.named or self.choice == "required"

    @property
    def held(self) -> frozenset[str]:
        """Names of the functions whose arguments have to match their schema."""
        if self.named:
            return frozenset([self.choice])
        return frozenset(self.schemas) if self.forced else self.strict

    @property
    def read(self) -> bool:
        """Whether calls are looked for in the answer."""
        return self.named or self.choice != "none"


def function_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
) -> Tool:
    """A tool of a body whose tools have these fields side by side."""
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


def choice_of(name: str) -> ToolChoice:
    """That this function has to be called."""
    return ToolChoice(type="function", function=ChosenFunction(name=name))


def make_tools(
    given: Sequence[Tool],
    choice: str | ToolChoice | None,
    *,
    several: bool,
    options: ParseOptions = BY_DEFAULT,
    fields: ToolFields = IN_CHATS,
) -> Tools:
    """Of the three fields of a body; raises InvalidRequestError for what they only say together."""
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(given):
        name = tool.function.name
        if name in schemas:
            path = fields.name.format(number)
            raise InvalidRequestError(path, f"{path} is {name!r} for a second time.")
        parameters = tool.function.parameters
        schemas[name] = _NO_PARAMETERS if parameters is None else parameters
    tools = Tools(
        [_for_template(tool.function) for tool in given],
        schemas,
        frozenset(tool.function.name for tool in given if tool.function.strict),
        _checked_choice(choice, schemas, fields),
        isinstance(choice, ToolChoice),
        several,
        fields,
    )
    for number, name in enumerate(schemas):
        if name in tools.held:
            path = fields.parameters.format(number)
            schemas[name] = _held_schema(schemas[name], path, options)
    return tools


def _for_template(function: Function) -> dict[str, Any]:
    said: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        said["description"] = function.description
    if function.parameters is not None:
        said["parameters"] = function.parameters
    return {"type": "function", "function": said}


def _checked_choice(
    choice: str | ToolChoice | None, schemas: Mapping[str, Any], fields: ToolFields
) -> str:
    """Without functions, the words that ask for none of them are accepted."""
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in schemas:
            path = fields.chosen
            raise InvalidRequestError(path, f"{path} is {name!r}, which is not one of the tools.")
        return name
    if schemas:
        return choice or "auto"
    if choice == "required":
        raise InvalidRequestError(
            "tool_choice", "tool_choice is 'required', but there are no tools."
        )
    return "none"


def _held_schema(schema: dict[str, Any], path: str, options: ParseOptions) -> dict[str, Any]:
    """What arguments are held to: an object, also where the schema leaves its type out."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"{path}.type", f"{path}.type is {show(kind)}; arguments are an object."
        )
    return served_schema({"type": "object"} | schema | {"type": "object"}, path, options)
