"""What the process that mutants are forked from has imported: what takes long and is not ours."""

import contextlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does

import numpy  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401
import transformers.modeling_utils  # noqa: E402, F401

with contextlib.suppress(ImportError):
    import triton.language  # noqa: F401
