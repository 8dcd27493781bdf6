"""One of flashinfer's decode wrappers, planned for step after step of a CUDA graph.

What its Python does at every plan takes several times as long as the plan itself, which a compiled
module makes, and always comes to the same call: only the sequences' blocks and lengths are others.
So one call is watched, and made again with the new ones. Where it is not what is expected here, the
wrapper goes on planning.

The module writes a schedule to pinned memory, and has a copy engine bring it to the device. Where
these engines move KV and states, a step would wait for them; so its copy goes nowhere, on a stream
of its own, and a kernel brings the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.pinned import WORD, as_on_device, copy_by_kernel

# What the schedule's memory holds before a plan, to see what the plan writes.
_PATTERNS = 0x55, 0xAA


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
        there = getattr(wrapper, "_int_workspace_buffer", None)
        pinned = getattr(wrapper, "_pin_memory_int_workspace_buffer", None)
        places = [i for i, argument in enumerate(arguments) if argument is there]
        if there is None or pinned is None or len(places) != 1:
            return None
        if not there.is_cuda or not any(argument is pinned for argument in arguments):
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


@functools.cache
def _aside(device: torch.device, size: int) -> tuple[torch.cuda.Stream, Tensor]:
    """A stream, and [size] bytes that nothing reads."""
    return torch.cuda.Stream(device), torch.empty(size, dtype=torch.uint8, device=device)


def _are_the_same(argument: Any, kv_length: Tensor) -> bool:
    if not isinstance(argument, Tensor) or argument.device != kv_length.device:
        return False
    return argument.dtype == kv_length.dtype and torch.equal(argument, kv_length)
