"""Flashinfer's wrappers, planned for step after step without the copy engines.

A wrapper's plan is a schedule, which a compiled module writes to pinned memory, and has a copy
engine bring to the device, as the wrapper does with what it is given. Where these engines move KV
and states, a step would wait for them, of a conversation that comes back for tens of milliseconds.
So their copies go nowhere, on a stream of its own, and kernels bring what a step reads.

What a decode wrapper's Python does at every plan takes several times as long as the plan itself,
and always comes to the same call in a CUDA graph: only the sequences' blocks and lengths are
others. So one call is watched, and made again with the new ones.

Where anything is not what is expected here, as in another version, the wrapper plans as it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.kernels.pinned import as_on_device, copy_by_kernel

# What the schedule's memory holds before a plan, to see what the plan writes: no number of a
# schedule, which would be of 1e9 rows.
_UNWRITTEN = 0x55555555
# Words without a gap in which a plan writes none: its arrays lie side by side.
_WINDOW = 1 << 12
# On the device, written by plans, and read by none of the kernels that are used here.
_UNREAD = {"_int_workspace_buffer", "_kv_lens_buffer"}


class Aside:
    """One wrapper, whose `plan` is called at every step.

    How much a plan has written is not said anywhere. So as much is brought as any of them has
    written so far, which is seen in memory that none had written to.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._words = 0  # of the schedule, at most; before the first plan none
        self._is_known = hasattr(wrapper, "is_cuda_graph_enabled") and _has_schedule(wrapper)
        if self._is_known:
            words = wrapper._pin_memory_int_workspace_buffer.view(torch.int32).fill_(_UNWRITTEN)
            self._pinned, self._numbers = as_on_device(words), words.numpy()

    def plan(self, plan: Callable[[], object], on_device: Mapping[str, Tensor]) -> None:
        """`plan` the wrapper. on_device: what it brings there besides the schedule, by the names of
        its attributes; those of a CUDA graph's wrapper are its own buffers."""
        if not self._is_known or not self._is_planned(plan, on_device):
            self._is_known = False
            plan()

    def _is_planned(self, plan: Callable[[], object], on_device: Mapping[str, Tensor]) -> bool:
        """Whether all is as expected."""
        wrapper = self.wrapper
        schedule, before = wrapper._int_workspace_buffer, dict(vars(wrapper))
        stream, nowhere = _aside(schedule.device, schedule.nbytes)
        wrapper._int_workspace_buffer = nowhere
        try:
            with torch.cuda.stream(stream):
                if wrapper.is_cuda_graph_enabled:  # which copies to where its buffers are
                    vars(wrapper).update({n: torch.empty_like(t) for n, t in on_device.items()})
                plan()
            after = vars(wrapper)
            if not self._words and not _are_all(on_device.keys(), before, after):
                return False
        finally:
            wrapper._int_workspace_buffer = schedule
            if wrapper.is_cuda_graph_enabled:
                vars(wrapper).update({name: before[name] for name in on_device})
        window = _WINDOW if self._words else len(self._numbers)
        self._words = _end_of_what_was_written(self._numbers, self._words, window)
        vars(wrapper).update(on_device)
        target = schedule.view(torch.int32)
        copy_by_kernel(target[: self._words], self._pinned[: self._words])
        return True


@dataclass(frozen=True, slots=True)
class PlanCall:
    """The call of a module that planned a CUDA graph's wrapper."""

    aside: Aside
    arguments: tuple[Any, ...]
    indptr: int  # its place among them
    kv_length: int
    schedule: int  # of the device's memory for it

    @classmethod
    def watch(
        cls, wrapper: Any, plan: Callable[[], object], indptr: Tensor, kv_length: Tensor
    ) -> PlanCall | None:
        """`plan` the wrapper, with indptr [sequences + 1] on the host, for sequences of kv_length
        [sequences]. None: the module was not called once with these two and the schedule."""
        aside, calls = Aside(wrapper), []
        module = wrapper._cached_module

        def note(*arguments: Any) -> Any:
            calls.append(arguments)
            return module.plan(*arguments)

        wrapper._cached_module = SimpleNamespace(plan=note)
        try:
            plan()
        finally:
            wrapper._cached_module = module
        there = getattr(wrapper, "_int_workspace_buffer", None)
        if len(calls) != 1 or there is None:
            return None
        places = [
            [i for i, argument in enumerate(calls[0]) if argument is indptr],
            [i for i, argument in enumerate(calls[0]) if _are_the_same(argument, kv_length)],
            [i for i, argument in enumerate(calls[0]) if argument is there],
        ]
        if any(len(found) != 1 for found in places):
            return None
        return cls(aside, calls[0], *(found[0] for found in places))

    def again(self, indptr: Tensor, kv_length: Tensor) -> None:
        """For as many sequences, of which these are the figures now."""
        wrapper, arguments = self.aside.wrapper, list(self.arguments)
        arguments[self.indptr], arguments[self.kv_length] = indptr, kv_length

        def plan() -> None:
            arguments[self.schedule] = wrapper._int_workspace_buffer
            wrapper._plan_info = wrapper._cached_module.plan(*arguments)

        self.aside.plan(plan, {})


def _has_schedule(wrapper: Any) -> bool:
    """Whether it has one on a GPU, and pinned memory for it."""
    there = getattr(wrapper, "_int_workspace_buffer", None)
    pinned = getattr(wrapper, "_pin_memory_int_workspace_buffer", None)
    return there is not None and pinned is not None and bool(there.is_cuda)


def _end_of_what_was_written(numbers: npt.NDArray[np.int32], known: int, window: int) -> int:
    """In words. As many as are known have been, and behind them there are no gaps of `window`."""
    while (written := np.flatnonzero(numbers[known : known + window] != _UNWRITTEN)).size:
        known += int(written[-1]) + 1
    return known


def _are_all(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether these are all of a wrapper's attributes on the device that a plan has set."""
    found = {
        name
        for name, value in after.items()
        if isinstance(value, Tensor) and value.is_cuda and value is not before.get(name)
    }
    return found - _UNREAD <= set(names) <= after.keys()


@functools.cache
def _aside(device: torch.device, size: int) -> tuple[torch.cuda.Stream, Tensor]:
    """A stream, and [size] bytes that nothing reads."""
    return torch.cuda.Stream(device), torch.empty(size, dtype=torch.uint8, device=device)


def _are_the_same(argument: Any, kv_length: Tensor) -> bool:
    if not isinstance(argument, Tensor) or argument.device != kv_length.device:
        return False
    return argument.dtype == kv_length.dtype and torch.equal(argument, kv_length)
