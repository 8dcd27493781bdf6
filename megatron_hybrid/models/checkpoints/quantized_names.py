"""The modules that a checkpoint's quantisation names: by name, glob or regular expression, and with
whatever prefix its author's library gave them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from megatron_hybrid.errors import ConfigurationError

T = TypeVar("T")
Default = TypeVar("Default")

# What libraries put before "layers.0...", the longest first.
_PREFIXES = (
    "model.language_model.", "language_model.model.", "language_model.backbone.", "language_model.",
    "llm.model.", "backbone.", "model.",
)  # fmt: skip
_REGEX_PREFIX = re.compile(
    r"^(\^?(?:\(\?:)?)(?:"
    + "|".join(re.escape(prefix).replace(r"\.", r"\\?\.") for prefix in _PREFIXES)
    + ")(?![*+?])"
)
# Weights that one checkpoint has in one piece and another in parts.
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_WHOLE = {part: whole for whole, parts in _PARTS.items() for part in parts}
_NOTHING: Any = object()


class NamedModules(Generic[T]):
    """What a configuration says of the modules that it names: a value (hashable) for each entry.

    An entry is the name of a module, and counts for all that are inside it; the end of a name
    ("gate", "mlp.gate"); a glob ("mtp*"); or, after "re:", a regular expression that matches from
    the start of a name. The module's own name goes before those around it, then come ends of names,
    then patterns, of which the first counts. Entries with another of the usual prefixes match too,
    and those of a fused weight count for its parts, and the parts' for it.
    """

    def __init__(self, entries: Iterable[tuple[str, T]], where: str) -> None:
        """`where`: the file that says so. Raises ConfigurationError for what is no regular
        expression."""
        self._where = where
        self._names: dict[str, T] = {}
        self._bare: dict[str, T] = {}
        self._patterns: list[tuple[re.Pattern[str], re.Pattern[str] | None, T]] = []
        globs: dict[T, list[str]] = {}
        for entry, value in entries:
            if entry.startswith("re:"):
                own, other = self._compiled(entry[3:]), None
                if "(?!" not in entry and "(?<!" not in entry:  # those deny the name as it is
                    other = self._compiled(_REGEX_PREFIX.sub(r"\1", entry[3:]))
                self._patterns.append((own, other, value))
            elif "*" in entry or "?" in entry:
                globs.setdefault(value, []).append(entry)
            else:
                self._names.setdefault(entry, value)
                self._bare.setdefault(_without_prefix(entry), value)
        for value, those in globs.items():
            self._patterns.append((_globs(those), _globs(map(_without_prefix, those)), value))

    def find(self, module: str, default: Default) -> T | Default:
        """What is said of a module, by its name in the checkpoint; `default` where nothing is.

        Raises ConfigurationError where one thing is said of one part of a fused weight, and
        another of another.
        """
        found = self._find(module)
        parent, dot, last = module.rpartition(".")
        if found is _NOTHING and last in _WHOLE:  # not by patterns: ".*gate" means no up_proj
            found = self._named(parent + dot + _WHOLE[last])
        if found is _NOTHING and last in _PARTS:
            of_parts = {self._find(parent + dot + part) for part in _PARTS[last]}
            if len(of_parts) > 1:
                raise ConfigurationError(
                    f"{self._where} says different things of {', '.join(_PARTS[last])} in "
                    f"{parent or 'the model'}, which are one weight, {last}, in the checkpoint."
                )
            found = of_parts.pop()
        return default if found is _NOTHING else found

    def _find(self, module: str) -> Any:
        found, bare = self._named(module), _without_prefix(module)
        if found is not _NOTHING:
            return found
        for own, other, value in self._patterns:
            if own.match(module) or (other is not None and other.match(bare)):
                return value
        return _NOTHING

    def _named(self, module: str) -> Any:
        bare = _without_prefix(module)
        for names, name in ((self._names, module), (self._bare, bare)):
            while name:
                if name in names:
                    return names[name]
                name = name.rpartition(".")[0]
        end = module.partition(".")[2]
        while end:
            if end in self._names:
                return self._names[end]
            end = end.partition(".")[2]
        return _NOTHING

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"{self._where} names modules by {pattern!r}, which is no regular expression: "
                f"{error}."
            ) from error


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _globs(globs: Iterable[str]) -> re.Pattern[str]:
    """One expression for all of them, which takes a hundredth of the time."""
    escaped = (re.escape(g).replace(r"\*", ".*").replace(r"\?", ".") for g in globs)
    return re.compile(f"(?:{'|'.join(escaped)})$")
