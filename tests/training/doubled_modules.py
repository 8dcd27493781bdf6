"""Modules that stand for those of packages which are not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def install_modules(
    monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]
) -> None:
    """By their names, each behind its package, with what is in them."""
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
