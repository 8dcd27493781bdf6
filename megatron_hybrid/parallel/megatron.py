"""What we use of megatron-core, the same for 0.16 (Python 3.11) and 0.19 (Python 3.12).

Its import takes longer than torch's: only who has several ranks needs this module.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The bare `transformer-engine` package is an empty shell whose import raises something other than
# ImportError, which megatron.core does not expect. Only a complete installation may be seen.
if importlib.util.find_spec("transformer_engine_torch") is None:
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


@contextmanager
def _no_compiler() -> Iterator[None]:
    """megatron.core compiles some functions for training while it is imported, which loads torch's
    compiler: seconds for every process. Where it is disabled they stay plain in any case."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        yield
        return

    def plain(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return plain if function is None else function

    compiler, torch.compile = torch.compile, plain  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


with warnings.catch_warnings(), _no_compiler():
    # Warnings about the optimizers' missing Apex, which inference does not use.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

__all__ = ["initialize_model_parallel", "parallel_state"]


def initialize_model_parallel(**wanted: Any) -> None:
    """`parallel_state.initialize_model_parallel` with those arguments that this version has.

    Its positional order differs between versions, so everything is passed by name.
    """
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    parallel_state.initialize_model_parallel(
        **{name: value for name, value in wanted.items() if name in known}
    )
