"""Every public class and function says what it is for: what it takes, gives, changes and raises.

A method that overrides a documented one of a base class needs no words of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "megatron_hybrid"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class(NamedTuple):
    bases: list[str]
    documented: set[str]


def test_every_public_class_and_function_is_documented() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = {
        node.name: Class(list(map(name_of, node.bases)), documented_in(node))
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    missing = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in undocumented(tree.body, classes)
    ]
    assert not missing, "\n".join(missing)


def undocumented(
    body: list[ast.stmt], classes: dict[str, Class], owner: ast.ClassDef | None = None
) -> Iterator[tuple[int, str]]:
    """Line and name of what says nothing; `owner`: the class whose body it is."""
    for node in body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        is_said = ast.get_docstring(node) is not None
        if isinstance(node, Function):
            decorators = {name_of(one).rpartition(".")[2] for one in node.decorator_list}
            is_said = is_said or bool(decorators & {"overload", "setter", "override"})
            bases = [] if owner is None else list(map(name_of, owner.bases))
            is_said = is_said or inherits(bases, node.name, classes)
        else:
            yield from undocumented(node.body, classes, node)
        if not is_said:
            yield node.lineno, node.name if owner is None else f"{owner.name}.{node.name}"


def inherits(bases: list[str], method: str, classes: dict[str, Class]) -> bool:
    """Whether one of these classes, or of those that they are made from, has words for it."""
    known = [classes[base] for base in bases if base in classes]
    return any(method in base.documented or inherits(base.bases, method, classes) for base in known)


def documented_in(node: ast.ClassDef) -> set[str]:
    functions = [part for part in node.body if isinstance(part, Function)]
    return {part.name for part in functions if ast.get_docstring(part) is not None}


def name_of(node: ast.expr) -> str:
    """Of a base class or a decorator, without its parameters."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return ast.unparse(node)
