"""The way between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.device import device_errors, upload_together


@pytest.mark.parametrize("count", [0, 1, 3, 4, 17])
def test_arrays_of_several_types_go_together(count: int) -> None:
    random = np.random.default_rng(count)
    values = [
        random.random(count),
        random.integers(-(2**62), 2**62, count),
        random.random(count).astype(np.float32),
        random.integers(-(2**30), 2**30, count).astype(np.int32),
        random.integers(-9, 9, (count, 2))[:, 1],  # not contiguous
    ]
    found = upload_together(values, torch.device("cpu"))
    assert [part.dtype for part in found] == [
        torch.float64,
        torch.int64,
        torch.float32,
        torch.int32,
        torch.int64,
    ]
    first = found[0].data_ptr()
    for part, value in zip(found, values, strict=True):
        assert part.tolist() == value.tolist()
        assert (part.data_ptr() - first) % 16 == 0 or not count


def test_a_copy_does_not_change_with_the_array() -> None:
    value = np.zeros(3)
    (found,) = upload_together([value], torch.device("cpu"))
    value[:] = 1
    assert found.tolist() == [0, 0, 0]


class Runner:
    @device_errors
    def fail(self, error: Exception) -> None:
        """Raise it."""
        raise error

    @device_errors
    def add(self, a: int, *, b: int) -> int:
        """A sum."""
        return a + b


def test_a_device_that_failed_is_lost() -> None:
    with pytest.raises(DeviceLostError, match="The device failed: an illegal address"):
        Runner().fail(torch.AcceleratorError("an illegal address"))


def test_other_errors_and_results_pass() -> None:
    with pytest.raises(ValueError, match="mine"):
        Runner().fail(ValueError("mine"))
    assert Runner().add(1, b=2) == 3
    assert Runner.add.__doc__ == "A sum."
