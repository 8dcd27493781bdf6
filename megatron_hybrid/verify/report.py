"""What was checked and what came of it: lines for people, and a file that can be sent in. Nothing
in it names a path, a host or a prompt."""

from __future__ import annotations

import enum
import json
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_hybrid.errors import ConfigurationError

FORMAT = 1  # of the file; counted on when a field changes its meaning
_A_PATH = re.compile(r"(?<![\w/])(?:~|\.{1,2})?/[\w.@+~-]+(?:/[\w.@+~-]+)+/?")


class Outcome(enum.StrEnum):
    """Of one check."""

    OK = "ok"
    DIFFERS = "differs"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """`says`: in a sentence what was found, or why nothing was looked at. `figures`: numbers behind
    it."""

    name: str
    outcome: Outcome
    says: str
    figures: dict[str, Any] = field(default_factory=dict)


def ok(name: str, says: str, **figures: Any) -> Check:
    """Nothing is wrong."""
    return Check(name, Outcome.OK, says, figures)


def differs(name: str, says: str, **figures: Any) -> Check:
    """Something is."""
    return Check(name, Outcome.DIFFERS, says, figures)


def not_checked(name: str, why: str) -> Check:
    """There was nothing to look at, or no means to."""
    return Check(name, Outcome.NOT_CHECKED, why)


def check_place(path: str) -> None:
    """Raise ConfigurationError where no file could be written: said before the work, not after."""
    file = Path(path)
    if file.is_dir():
        raise ConfigurationError(f"--report is {path}, which is a folder; name a file.")
    if not file.parent.is_dir():
        raise ConfigurationError(f"--report is {path}, but there is no folder {file.parent}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"--report is {path}, which may not be written.")


class Report:
    """`private`: texts that must not be in it, for instance the model's folder."""

    def __init__(self, private: Iterable[str] = ()) -> None:
        self.about: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.speed: dict[str, Any] = {}
        hidden = [*private, str(Path.home()), socket.gethostname()]
        self._private = sorted({one for one in hidden if len(one) > 1}, key=len, reverse=True)

    @property
    def differs(self) -> bool:
        """Whether anything is wrong."""
        return any(check.outcome is Outcome.DIFFERS for check in self.checks)

    def line(self, check: Check) -> str:
        """For people."""
        return f"{check.outcome:<12}{check.name}: {self._clean(check.says)}"

    def summary(self) -> str:
        """The last line."""
        wrong = [check.name for check in self.checks if check.outcome is Outcome.DIFFERS]
        left = sum(check.outcome is Outcome.NOT_CHECKED for check in self.checks)
        text = f"{len(self.checks)} checks, {len(wrong)} differ, {left} not checked"
        return f"{text}: {', '.join(wrong)}." if wrong else f"{text}."

    def as_dict(self) -> dict[str, Any]:
        """What the file holds."""
        whole = {
            "format": FORMAT,
            "differs": self.differs,
            "about": self.about,
            "checks": [
                {"name": c.name, "outcome": str(c.outcome), "says": c.says, "figures": c.figures}
                for c in self.checks
            ],
            "speed": self.speed,
        }
        cleaned: dict[str, Any] = self._cleaned(whole)
        return cleaned

    def write(self, path: str | Path) -> None:
        """As JSON. Raises OSError."""
        text = json.dumps(self.as_dict(), indent=2, default=str)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): self._cleaned(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._cleaned(one) for one in value]
        return self._clean(value) if isinstance(value, str) else value

    def _clean(self, text: str) -> str:
        for one in self._private:
            text = re.sub(rf"(?<![\w-]){re.escape(one)}(?![\w-])", "...", text)
        return " ".join(_A_PATH.sub("...", text).split())
