"""Makes Triton's interpreter a third faster: imported by tests that run kernels in it."""

from __future__ import annotations

import os
from typing import Any

try:
    from triton.runtime import interpreter
except ImportError:  # the tests that need it are skipped
    interpreter = None

_patched: set[int] = set()  # the globals of functions, in one launch


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel's function, whose language is patched once a launch and not once a call: going
    through all names of `triton.language` takes longer than what most such functions do."""
    if (names := id(self.fn.__globals__)) not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(names)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()  # the end of the launch before restored some of it
    return _launch_plainly(self, *args, **kwargs)


if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
    _launch_plainly = interpreter.GridExecutor.__call__
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor.__call__ = _launch
