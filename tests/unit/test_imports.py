"""Imports point down: the order of the rooms, and no circle between modules."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_hybrid"

# From the bottom to the top: a module may import what is in its own room or in one further down.
# The longest name that fits is a module's room.
ROOMS = """
    errors values pause_mode routed_experts request request_checks reference_model
    cache kv_events
    flag_names settings rank_layout batch_invariant_flags config arguments
    memory kernels parallel layers
    models models.families models.checkpoints models.adapters
    weight_transfer
    disaggregation
    text execution engine
    watchdog
    scoring prompt_encoder growing_output llm training
    server.log_format server.keys server.addresses server.tls server.options
    server.sampling_defaults
    server.link server.replicas server.http server.processes server.loop
    server.ask server.cli
    dynamo ray
    versions verify
    terminal
    commands completion cli
""".split()


def modules() -> dict[str, Path]:
    """Every module of the package by its name in it, without the files that only mark folders."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imports(path: Path, names: dict[str, Path], *, types_too: bool = True) -> set[str]:
    """The package's modules that a file imports, at any place in it."""
    found = set()

    def look(node: ast.AST) -> None:
        if not types_too and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        found.update(_named(node, names))
        for child in ast.iter_child_nodes(node):
            look(child)

    look(ast.parse(path.read_text()))
    return found


def _named(node: ast.AST, names: dict[str, Path]) -> set[str]:
    found = set()
    if isinstance(node, ast.Import):
        found = {name.name for name in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for name in node.names:  # a module of the package, or something in the module
            inner = f"{node.module}.{name.name}"
            found.add(inner if inner.removeprefix(f"{PACKAGE}.") in names else node.module)
    inside = {name.removeprefix(f"{PACKAGE}.") for name in found if name.startswith(PACKAGE)}
    return inside & names.keys()


def room_of(module: str) -> str:
    fitting = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(fitting, key=len)


def test_imports_point_down() -> None:
    names = modules()
    upwards = [
        f"{module} imports {other}"
        for module, path in names.items()
        for other in sorted(imports(path, names) - {module})
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert not upwards, "\n".join(upwards)


def test_no_import_circle() -> None:
    names = modules()
    graph = {
        module: imports(path, names, types_too=False) - {module} for module, path in names.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


LONGEST_FILE = 450  # lines; more are two things


def test_a_file_is_no_longer_than_a_head_can_hold() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    too_long = {name: count for name, count in lines.items() if count > LONGEST_FILE}
    assert not {name: count for name, count in too_long.items() if not name.endswith(".triton")}
