"""Without a GPU Triton's kernels run in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tests.interpreter  # noqa: F401


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers."""
    # Not torch.use_deterministic_algorithms, which imports the compiler: three seconds.
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(1).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")
