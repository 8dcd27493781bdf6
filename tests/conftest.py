"""Without a GPU Triton's kernels run in its interpreter, which is chosen when triton is imported:
before any test module does that."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")
