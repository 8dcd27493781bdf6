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

from megatron_hybrid.kernels.pinned import WORD, as_on_device, copy_by_kernel

# What the schedule's memory holds before a plan, to see what the plan writes.
_PATTERNS = 0x55, 0xAA
_UNWRITTEN = int.from_bytes(4 * _PATTERNS[:1])  # no number of a schedule: it would be of 1e9 rows
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
        self._names: set[str] = set()  # of its attributes; before the first plan none
        self._words = 0  # of the schedule, at most
        self._is_known = hasattr(wrapper, "is_cuda_graph_enabled") and _has_schedule(wrapper)
        if self._is_known:
            pinned = wrapper._pin_memory_int_workspace_buffer.fill_(_PATTERNS[0])
            self._pinned, self._numbers = as_on_device(pinned), pinned.view(torch.int32).numpy()

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
            if not self._names and not _are_all(on_device.keys(), before, after):
                return False
        finally:
            wrapper._int_workspace_buffer = schedule
            if wrapper.is_cuda_graph_enabled:
                vars(wrapper).update({name: before[name] for name in on_device})
        window = _WINDOW if self._names else len(self._numbers)
        self._words = _end_of_what_was_written(self._numbers, self._words, window)
        self._names = set(on_device)
        vars(wrapper).update(on_device)
        target = schedule.view(torch.int32)
        copy_by_kernel(target[: self._words], self._pinned[: self._words])
        return True


@dataclass(frozen=True, slots=True)
class PlanCall:
    """The call of a module that planned a wrapper."""

    wrapper: Any
    arguments: tuple[Any, ...]
    indptr: int  # its place among them
    kv_length: int
    schedule: Schedule | None  # None: the module brings it

    @classmethod
    def watch(
        cls, wrapper: Any, plan: Callable[[], object], indptr: Tensor, kv_length: Tensor
    ) -> PlanCall | None:
        """`plan` the wrapper, with indptr [sequences + 1] on the host, for sequences of kv_length
        [sequences]. None: the module was not called once with these two."""
        calls: list[tuple[Any, ...]] = []
        module = wrapper._cached_module

        def note(*arguments: Any) -> Any:
            calls.append(arguments)
            return module.plan(*arguments)

        wrapper._cached_module = SimpleNamespace(plan=note)
        try:
            plan()
        finally:
            wrapper._cached_module = module
        if len(calls) != 1:
            return None
        bounds = [i for i, argument in enumerate(calls[0]) if argument is indptr]
        lengths = [i for i, argument in enumerate(calls[0]) if _are_the_same(argument, kv_length)]
        if len(bounds) != 1 or len(lengths) != 1:
            return None
        return cls(wrapper, calls[0], bounds[0], lengths[0], Schedule.of(wrapper, calls[0]))

    def again(self, indptr: Tensor, kv_length: Tensor) -> None:
        """For as many sequences, of which these are the figures now."""
        arguments = list(self.arguments)
        arguments[self.indptr], arguments[self.kv_length] = indptr, kv_length
        plan = self.wrapper._cached_module.plan
        if self.schedule is None:
            self.wrapper._plan_info = plan(*arguments)
        else:
            self.wrapper._plan_info = self.schedule.plan(plan, arguments)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a plan writes to pinned memory, and a kernel brings to the device."""

    on_device: Tensor  # [words]
    pinned: Tensor  # [words], as the GPU sees them; a plan's arguments keep them
    words: int  # that a plan writes
    info: list[int]  # what the module says of a plan that writes so many
    place: int  # of the device's memory among a plan's arguments

    @classmethod
    def of(cls, wrapper: Any, arguments: tuple[Any, ...]) -> Schedule | None:
        """Of a call that planned a CUDA graph's wrapper, which is made twice more. None: it is not
        one with a schedule for a GPU."""
        if not _has_schedule(wrapper):
            return None
        there, pinned = wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
        places = [i for i, argument in enumerate(arguments) if argument is there]
        if len(places) != 1 or not any(argument is pinned for argument in arguments):
            return None
        written = 0
        for pattern in _PATTERNS:
            pinned.fill_(pattern)
            info = list(wrapper._cached_module.plan(*arguments))
            others = (pinned != pattern).nonzero()
            written = max([written, *others[-1:].add(1).flatten().tolist()])
        words = -(-written // WORD)
        return cls(there.view(torch.int32), as_on_device(pinned), words, info, places[0])

    def plan(self, plan: Callable[..., Any], arguments: list[Any]) -> Any:
        """Make it with these arguments; what the module says."""
        stream, arguments[self.place] = _aside(self.on_device.device, self.on_device.nbytes)
        with torch.cuda.stream(stream):
            info = plan(*arguments)
        # Where it is another one than the one that was watched, all of the memory.
        words = self.words if list(info) == self.info else len(self.on_device)
        copy_by_kernel(self.on_device[:words], self.pinned[:words])
        return info


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
