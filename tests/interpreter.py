"""Makes Triton's interpreter a third faster, and its FP8 (e4m3) numbers those of the devices:
imported by tests that run kernels in it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

try:
    import triton.language as tl
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


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """From and to FP8 as torch does: the interpreter rounds halves up, some of them to half of what
    they should be, and takes a NaN for 480."""
    if tl.float8e4nv not in (source, target):
        return _convert_float_plainly(values, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(values)).view(_torch_dtype(source))
    converted = numbers.float().to(_torch_dtype(target))
    return converted.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def _torch_dtype(dtype: Any) -> torch.dtype:
    by_name = {"fp8e4nv": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return getattr(torch, by_name[dtype.name])


if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
    _launch_plainly = interpreter.GridExecutor.__call__
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor.__call__ = _launch
    _convert_float_plainly = interpreter._convert_float
    interpreter._convert_float = _convert_float
