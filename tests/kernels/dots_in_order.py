"""Products of Triton's interpreter as tensor cores make them: column after column, so that tiles
change no bits, in float32, and of bfloat16, too. A kernel whose own order of sums depends on its
tiles, or that cuts the columns, then has other bits in other tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def _numbers(operand: Any) -> np.ndarray:
    """float32, or int32 of integers."""
    data = operand.data
    if operand.dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        halves = interpreter._convert_float(data, operand.dtype, tl.float16, None)
        return halves.view(np.float16).astype(np.float32)
    return data.astype(np.float32 if operand.dtype.is_floating() else np.int32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    left, right, total = _numbers(a), _numbers(b), d.data.copy()
    for k in range(left.shape[-1]):
        total += left[:, k : k + 1] * right[k : k + 1]
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    yield
