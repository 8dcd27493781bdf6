"""Small wrong changes to a module, one at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """`number`: of the change among those of its file; `line`: where it is; `change`: in words."""

    file: str
    number: int
    line: int
    change: str


def mutants_of(file: Path, root: Path) -> list[Mutant]:
    """All of a module's, in the order of its lines."""
    name = file.relative_to(root).as_posix()
    changes = _Changes(None)
    changes.visit(ast.parse(file.read_text()))
    return [Mutant(name, number, *found) for number, found in enumerate(changes.found)]


def mutated(source: str, number: int) -> ast.Module:
    """The module with one of its changes made."""
    tree = ast.parse(source)
    _Changes(number).visit(tree)
    return ast.fix_missing_locations(tree)


class _Changes(ast.NodeTransformer):
    """Counts what could be changed, and makes the change with the number that is wanted.

    Left out: annotations, decorators, docstrings, asserts, what is raised or logged, and names
    that are imported for types alone.
    """

    def __init__(self, wanted: int | None) -> None:
        self.found: list[tuple[int, str]] = []
        self._wanted = wanted

    def _is_wanted(self, node: ast.expr | ast.stmt, change: str) -> bool:
        self.found.append((node.lineno, change))
        return len(self.found) - 1 == self._wanted

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return node
        if isinstance(node, ast.Expr) and _is_said(node.value):
            return node
        result: ast.AST = super().visit(node)
        return result

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, old in list(_parts(node)):
            if isinstance(old, list):
                old[:] = [self.visit(part) if isinstance(part, ast.AST) else part for part in old]
            elif isinstance(old, ast.AST):
                setattr(node, name, self.visit(old))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for place, operator in enumerate(node.ops):
            other = _OTHER.get(type(operator))
            if other and self._is_wanted(node, f"{_word(operator)} -> {other.__name__}"):
                node.ops[place] = other()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _OTHER.get(type(node.op))
        if other and self._is_wanted(node, f"{_word(node.op)} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        other = _OTHER[type(node.op)]
        if self._is_wanted(node, f"{_word(node.op)} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not) and self._is_wanted(node, "not left out"):
            return self.generic_visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_wanted(node, f"{node.value} -> {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int) and self._is_wanted(
            node, f"{node.value} -> {node.value + 1}"
        ):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _OTHER_FUNCTION:
            other = _OTHER_FUNCTION[node.func.id]
            if self._is_wanted(node, f"{node.func.id} -> {other}"):
                node.func.id = other
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._is_wanted(node, "call left out"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if self._is_wanted(node, "assignment left out"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call) and self._is_wanted(
            node, "condition turned round"
        ):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        is_none = node.value is None or ast.dump(node.value) == ast.dump(ast.Constant(None))
        if not is_none and self._is_wanted(node, "returns None"):
            node.value = ast.Constant(None)
            return node
        return self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        if self._is_wanted(node, "break -> continue"):
            return ast.copy_location(ast.Continue(), node)
        return node

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        if self._is_wanted(node, "continue -> break"):
            return ast.copy_location(ast.Break(), node)
        return node


def _parts(node: ast.AST) -> Iterator[tuple[str, object]]:
    """A node's children without what is no behaviour."""
    left_out = {"annotation", "returns", "decorator_list", "type_params", "bases"}
    return ((name, part) for name, part in ast.iter_fields(node) if name not in left_out)


def _is_said(value: ast.expr) -> bool:
    """Whether a statement is a docstring, or a call that logs."""
    if isinstance(value, ast.Constant):
        return True
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(("logger.", "log_"))


def _word(operator: ast.AST) -> str:
    return type(operator).__name__
