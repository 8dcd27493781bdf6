"""References within a JSON Schema: what they name, and how far they lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote


def find(root: Mapping[str, Any], reference: str) -> Any:
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


def depth_through_references(root: Mapping[str, Any], step: Callable[[], None]) -> int:
    """How many lists and objects inside each other a reader can meet who follows each reference
    once, or more. step: called for each of them that is looked at here.

    Parts that refer to each other count as if they all stood inside each other: which one a reader
    comes to first is not known.
    """
    own = {name: value for name, value in root.items() if name not in ("$defs", "definitions")}
    depths: dict[str, int] = {}
    named: dict[str, list[str]] = {}
    pending: list[tuple[str, Any]] = [("#", own)]
    while pending:
        place, part = pending.pop()
        if place in depths:
            continue
        depths[place], references = look_through(part, step)
        named[place] = []
        for reference in references:
            target = find(root, reference)
            if target is root:
                reference = "#"
            if isinstance(target, (Mapping, list)):
                named[place].append(reference)
                pending.append((reference, own if target is root else target))
    return _longest("#", named, depths)


def look_through(part: Any, step: Callable[[], None] = lambda: None) -> tuple[int, list[str]]:
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
