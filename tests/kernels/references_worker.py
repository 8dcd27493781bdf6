"""Prints each Triton kernel and what Triton says of what it calls: for test_references.py."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

from triton.runtime.jit import JITFunction

from megatron_hybrid import kernels


def jitted(value: Any) -> JITFunction | None:
    """Of a kernel, whatever it is wrapped in."""
    for _ in range(5):
        if value is None or isinstance(value, JITFunction):
            return value
        value = getattr(value, "fn", None) or getattr(value, "kernel", None)
    return None


def main() -> None:
    said = {}
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        try:
            members = vars(importlib.import_module(module.name))
        except ImportError:  # a library's, which is not installed
            continue
        for name, value in members.items():
            function = jitted(value)
            if function is None or function.__module__ != module.name:
                continue
            try:
                said[f"{module.name}.{name}"] = "" if function.cache_key else "no key"
            except Exception as error:
                said[f"{module.name}.{name}"] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
