"""JSON Schemas of answers: what is done to a client's schema before an answer is held to it, and
where the references in it lead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.protocol.parsing import JsonSchema
from megatron_hybrid.server.options import ParseOptions

MAX_DEPTH = 120  # of lists and objects in each other; llguidance reads 127
MAX_REFERRED_DEPTH = 1000  # the same if references are followed; twice as many crash llguidance
MAX_STEPS = 200_000  # schemas to look at and names to write down, in one request's schema
# Where a schema holds others. All else in it is data: `default`, `enum`, `const`, `examples`.
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", *_DEFINITIONS)
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
# Those that say more of the very value that the schema itself is about.
_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_NAMES = ("properties", "patternProperties")
_SAYS_OTHERWISE = ("additionalProperties", "unevaluatedProperties")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
_OF_THE_WHOLE = (*_DEFINITIONS, "$id", "$schema")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
LARGEST_INTEGER = 2**63 - 1024  # the largest below 2**63 that llguidance, with doubles, keeps
# Others are only notes by the standard, and refused by llguidance.
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def served_schema(schema: JsonSchema, path: str, options: ParseOptions) -> JsonSchema:
    """The schema that an answer is held to; `path`: the schema's name in the body.

    An object with `properties` has no others unless its schema says so (`additionalProperties`,
    `unevaluatedProperties`): the letter of the standard allows any, and small models then never
    end. What changes nothing, but llguidance refuses, is left out. Raises InvalidRequestError.
    """
    depth, _ = _look_through(schema)
    if depth > MAX_DEPTH + 1:  # itself, and those in it
        raise InvalidRequestError(
            path, f"{path} has more than {MAX_DEPTH} lists and objects inside each other."
        )
    return _Schema(schema, path, close=options.close_json_objects).served()


def with_definitions(part: Any, served: Mapping[str, Any]) -> Any:
    """A part of a served schema as a schema of its own: its references lead to definitions."""
    if not isinstance(part, Mapping) or not _look_through(part)[1]:
        return part
    return {**part, **{name: served[name] for name in _DEFINITIONS if name in served}}


class _Schema:
    """One schema on its way to its served form.

    Where several parts describe one object (`allOf`, a `$ref` beside `properties`), none of them
    may be closed, since it would forbid the names of the others: they stay open, and the object is
    closed around the names of all. What such a part refers to is copied, since others may refer to
    it as the whole of an object. So is what is no definition by itself: then all references lead to
    definitions, which go with a part that is taken out (`with_definitions`).
    """

    def __init__(self, root: JsonSchema, path: str, *, close: bool) -> None:
        self._root = root
        self._path = path
        self._close = close
        self._steps = 0
        # Of a reference, and whether as a part: the one of its copy; copies to be made, by name.
        self._copies: dict[tuple[str, bool], str] = {}
        self._pending: list[tuple[str, JsonSchema, bool]] = []
        self._integers: dict[str, str] = {}  # bounds of integers: the name of their definition
        self._shared_schemas: JsonSchema = {}
        definitions = root.get("$defs", {})
        self._definitions = definitions if isinstance(definitions, dict) else None
        self._prefix = "copy"
        while any(name.startswith(self._prefix) for name in self._definitions or ()):
            self._prefix += "_"

    def served(self) -> JsonSchema:
        result: JsonSchema = self._walk(self._root, is_part=False)
        copies = {}
        while self._pending:
            name, original, is_part = self._pending.pop()
            copies[name] = self._walk(original, is_part=is_part)
        copies |= self._shared_schemas
        if copies:
            result["$defs"] = {**result.get("$defs", {}), **copies}
        if _depth_through_references(result, self._step) > MAX_REFERRED_DEPTH:
            raise InvalidRequestError(
                self._path,
                f"{self._path} has references ($ref) that lead too deep: more than "
                f"{MAX_REFERRED_DEPTH} lists and objects inside each other, if they are followed.",
            )
        return result

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > MAX_STEPS:
            raise InvalidRequestError(
                self._path,
                f"{self._path} is too large: more than {MAX_STEPS} schemas and names have to be "
                "looked at.",
            )

    def _walk(self, schema: Any, *, is_part: bool) -> Any:
        """is_part: another schema says more of the same value."""
        if not isinstance(schema, dict):
            return schema
        self._step()
        combined = self._close and not is_part and _count_parts(schema) > 1
        parts_of_one = is_part or combined
        result = {
            key: self._value(key, value, parts_of_one)
            for key, value in schema.items()
            if not _changes_nothing(key, value)
        }
        if self._close and not is_part:
            self._close_object(schema, result, combined)
            if _bound_integer(result):
                return self._shared(result)
        return result

    def _shared(self, schema: JsonSchema) -> JsonSchema:
        """A reference to this schema if it is one of integers in a range and nothing else:
        llguidance takes a millisecond for each range, and some hundred are too many for it."""
        bounds = {name: schema[name] for name in (*_LOWER, *_UPPER) if name in schema}
        is_range = schema["type"] == "integer" and set(schema) <= {"type", *bounds, *_NOTES}
        if not is_range or self._definitions is None:
            return schema
        name = self._integers.setdefault(str(bounds), f"{self._prefix}_i{len(self._integers)}")
        self._shared_schemas[name] = {"type": "integer", **bounds}
        return {"$ref": f"#/$defs/{name}"}

    def _value(self, key: str, value: Any, parts_of_one: bool) -> Any:
        """What a keyword becomes."""
        if key == "$ref" and isinstance(value, str):
            plain = _DEFINITION.fullmatch(value) is not None and not parts_of_one
            return value if plain else self._copy_of(value, parts_of_one)
        is_part = parts_of_one and key in _SAME_VALUE
        if isinstance(value, list) and (key in _LISTS or key == "items"):
            return [self._walk(one, is_part=is_part) for one in value]
        if isinstance(value, dict) and key in _BY_NAME:
            return {name: self._walk(one, is_part=is_part) for name, one in value.items()}
        return self._walk(value, is_part=is_part) if key in _SINGLE else value

    def _copy_of(self, reference: str, is_part: bool) -> str:
        """A reference to the same; what is not found is left for llguidance to refuse."""
        key = reference, is_part
        if key in self._copies:
            return self._copies[key]
        target = _find(self._root, reference)
        if not isinstance(target, dict) or self._definitions is None:
            return reference
        name = f"{self._prefix}{len(self._copies)}"
        self._copies[key] = f"#/$defs/{name}"
        if target is self._root:
            target = {key: value for key, value in target.items() if key not in _OF_THE_WHOLE}
        self._pending.append((name, target, is_part))
        return self._copies[key]

    def _close_object(self, schema: JsonSchema, result: JsonSchema, combined: bool) -> None:
        if result.get("unevaluatedProperties") is False and "additionalProperties" not in schema:
            del result["unevaluatedProperties"]
        elif any(name in schema for name in _SAYS_OTHERWISE):
            return
        own = [name for name in _NAMES if name in schema]
        if not combined:
            if own:
                result["additionalProperties"] = False
            return
        names = self._names_of_all_parts(schema)
        if names is None or not any(names.values()):
            return
        if all(set(names[name]) <= set(schema.get(name, ())) for name in _NAMES):
            result["additionalProperties"] = False
        elif isinstance(result.get("allOf", []), list):
            closing = {**names, "additionalProperties": False}
            result["allOf"] = [*result.get("allOf", []), closing]

    def _names_of_all_parts(self, schema: JsonSchema) -> dict[str, dict[str, bool]] | None:
        """By keyword, the names that the parts of an object give it; None if one of them says
        which others it may have, or is not here."""
        names: dict[str, dict[str, bool]] = {name: {} for name in _NAMES}
        seen: set[str] = set()
        pending: list[Any] = [schema]
        while pending:
            part = pending.pop()
            self._step()
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                return None
            if part is not schema and any(name in part for name in _SAYS_OTHERWISE):
                return None
            for name in _NAMES:
                own = part.get(name)
                if isinstance(own, dict):
                    self._step(len(own))
                    names[name].update(dict.fromkeys(own, True))
            pending += (one for key in _SAME_VALUE for one in _as_list(part.get(key)))
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                pending.append(_find(self._root, reference))
        return names


def _count_parts(schema: JsonSchema) -> int:
    """How many parts of a schema describe its object's properties."""
    parts = len(_as_list(schema.get("allOf"))) + ("$ref" in schema)
    parts += any(name in schema for name in (*_NAMES, *_SAYS_OTHERWISE))
    return parts + sum(name in schema for name in ("anyOf", "oneOf"))


def _bound_integer(schema: JsonSchema) -> bool:
    """Give an integer without a bound the one of 64 bits: small models never end their digits.
    Whether it got one."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or "enum" in schema or "const" in schema:
        return False
    given = [schema[name] for name in (*_LOWER, *_UPPER) if name in schema]
    if any(not isinstance(bound, (int, float)) or abs(bound) > LARGEST_INTEGER for bound in given):
        return False
    has_lower, has_upper = (any(name in schema for name in names) for names in (_LOWER, _UPPER))
    if not has_lower:
        schema["minimum"] = -LARGEST_INTEGER
    if not has_upper:
        schema["maximum"] = LARGEST_INTEGER
    return not (has_lower and has_upper)


def _changes_nothing(key: str, value: Any) -> bool:
    """Whether this keyword allows all values."""
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    if key == "uniqueItems":
        return value is False
    return key.startswith("unevaluated") and value is True


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _find(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference names in the schema `root`; None if it is no place in it."""
    base = root.get("$id")
    if isinstance(base, str):
        reference = reference.removeprefix(base.removesuffix("#"))
    if reference not in ("", "#") and not reference.startswith("#/"):
        return None
    found: Any = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found


def _depth_through_references(root: Mapping[str, Any], step: Callable[[], None]) -> int:
    """How many lists and objects inside each other a reader can meet who follows each reference
    once, or more. step: called for each of them that is looked at here.

    Parts that refer to each other count as if they all stood inside each other: which one a reader
    comes to first is not known.
    """
    own = {name: value for name, value in root.items() if name not in _DEFINITIONS}
    depths: dict[str, int] = {}
    named: dict[str, list[str]] = {}
    pending: list[tuple[str, Any]] = [("#", own)]
    while pending:
        place, part = pending.pop()
        if place in depths:
            continue
        depths[place], references = _look_through(part, step)
        named[place] = []
        for reference in references:
            target = _find(root, reference)
            if target is root:
                reference = "#"
            if isinstance(target, (Mapping, list)):
                named[place].append(reference)
                pending.append((reference, own if target is root else target))
    return _longest("#", named, depths)


def _look_through(part: Any, step: Callable[[], None] = lambda: None) -> tuple[int, list[str]]:
    """How many lists and objects inside each other a part (one of them) is, and the references in
    it. step: called for each of them."""
    references: list[str] = []
    level, depth = [part], 0
    while level:
        inner: list[Any] = []
        for value in level:
            step()
            if isinstance(value, Mapping):
                if isinstance(reference := value.get("$ref"), str):
                    references.append(reference)
                inner += value.values()
            else:
                inner += value
        level = [value for value in inner if isinstance(value, (Mapping, list))]
        depth += 1
    return depth, references


def _longest(start: str, following: Mapping[str, Sequence[str]], weights: Mapping[str, int]) -> int:
    """The largest weight of a path from `start`, where a circle counts with all that is in it
    (Tarjan, 1972: circles come out after those that they lead to)."""
    order = {start: 0}
    lowest = {start: 0}
    open_ones = [start]
    longest: dict[str, int] = {}
    path = [(start, iter(following[start]))]
    while path:
        node, rest = path[-1]
        for other in rest:
            if other not in order:
                order[other] = lowest[other] = len(order)
                open_ones.append(other)
                path.append((other, iter(following[other])))
                break
            if other not in longest:
                lowest[node] = min(lowest[node], order[other])
        else:
            path.pop()
            if path:
                before = path[-1][0]
                lowest[before] = min(lowest[before], lowest[node])
            if lowest[node] == order[node]:
                circle = [open_ones.pop()]
                while circle[-1] != node:
                    circle.append(open_ones.pop())
                after = [longest.get(other, 0) for one in circle for other in following[one]]
                weight = sum(weights[one] for one in circle) + max(after, default=0)
                longest.update(dict.fromkeys(circle, weight))
    return longest[start]
