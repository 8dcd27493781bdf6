"""Plans of flashinfer's wrappers that leave their Python out, with wrappers of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.paged_attention.replanning import (
    _UNWRITTEN,
    Aside,
    PlanCall,
    _end_of_what_was_written,
)

BLOCK = 4


class Module:
    """What is compiled."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def plan(self, *arguments: Any) -> str:
        plain = [a.tolist() if isinstance(a, Tensor) else a for a in arguments]
        self.calls.append(plain)
        return f"plan {len(self.calls)}"


class Wrapper:
    """A decode wrapper; `alter` changes what it calls the module with."""

    def __init__(self, alter: Callable[[list[Any]], list[Any]] = lambda arguments: arguments):
        self._cached_module = Module()
        self._plan_info = ""
        self._int_workspace_buffer = torch.zeros(3)
        self._alter = alter

    def plan(self, indptr: Tensor, last_length: Tensor) -> None:
        queries = torch.arange(len(indptr), dtype=torch.int32)
        kv_length = (indptr[1:] - indptr[:-1] - 1) * BLOCK + last_length
        arguments = [
            self._int_workspace_buffer,
            queries,
            indptr,
            kv_length,
            len(last_length),
            8,
            False,
        ]
        self._plan_info = self._cached_module.plan(*self._alter(arguments))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def watch(wrapper: Wrapper, indptr: Tensor, last: Tensor, kv_length: Tensor) -> PlanCall | None:
    return PlanCall.watch(wrapper, lambda: wrapper.plan(indptr, last), indptr, kv_length)


def test_a_plan_that_was_watched_is_made_again_with_new_figures() -> None:
    wrapper = Wrapper()
    module = wrapper._cached_module
    call = watch(wrapper, ints(0, 2, 3), ints(1, 3), ints(5, 3))
    assert call is not None and wrapper._plan_info == "plan 1"
    assert wrapper._cached_module is module
    call.again(ints(0, 2, 4), ints(6, 8))
    assert wrapper._plan_info == "plan 2"
    wrapper.plan(ints(0, 2, 4), ints(2, 4))
    assert module.calls[1] == module.calls[2] != module.calls[0]


ALTERED: dict[str, Callable[[list[Any]], list[Any]]] = {
    "another schedule": lambda own: [own[0].clone(), *own[1:]],
    "a copy of the bounds": lambda own: [*own[:2], own[2].clone(), *own[3:]],
    "no lengths": lambda own: own[:3] + own[4:],
    "lengths twice": lambda own: [*own, own[3].clone()],
    "other lengths": lambda own: [*own[:3], own[3] + 1, *own[4:]],
    "lengths in 64 bits": lambda own: [*own[:3], own[3].long(), *own[4:]],
}


@pytest.mark.parametrize("name", ALTERED)
def test_nothing_is_made_of_a_call_that_is_not_understood(name: str) -> None:
    wrapper = Wrapper(ALTERED[name])
    assert watch(wrapper, ints(0, 2, 3), ints(1, 3), ints(5, 3)) is None
    assert wrapper._plan_info == "plan 1"


def test_nothing_is_made_of_two_calls() -> None:
    wrapper = Wrapper()
    indptr, last = ints(0, 2, 3), ints(1, 3)

    def twice() -> None:
        wrapper.plan(indptr, last)
        wrapper.plan(indptr, last)

    assert PlanCall.watch(wrapper, twice, indptr, ints(5, 3)) is None


def test_a_wrapper_keeps_its_module_when_a_plan_fails() -> None:
    wrapper = Wrapper()
    module = wrapper._cached_module

    def fail() -> None:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        PlanCall.watch(wrapper, fail, ints(0, 1), ints(1))
    assert wrapper._cached_module is module


def test_a_wrapper_without_a_gpu_plans_as_it_does() -> None:
    wrapper = Wrapper()
    Aside(wrapper).plan(lambda: wrapper.plan(ints(0, 2, 3), ints(1, 3)), {})
    assert wrapper._plan_info == "plan 1"


def test_as_much_is_brought_as_any_plan_has_written() -> None:
    numbers = np.full(1000, _UNWRITTEN, dtype=np.int32)
    known = most = 0
    for written, window in ((300, 1000), (100, 8), (301, 8), (300, 8), (700, 8)):
        numbers[:written] = 0
        numbers[10:13] = _UNWRITTEN  # between two arrays
        known = _end_of_what_was_written(numbers, known, window)
        most = max(most, written)
        assert known == most
    numbers[:] = 0
    assert _end_of_what_was_written(numbers, known, 8) == 1000
