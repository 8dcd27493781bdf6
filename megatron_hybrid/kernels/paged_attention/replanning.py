"""One of flashinfer's decode wrappers, planned for step after step of a CUDA graph.

What its Python does at every plan takes several times as long as the plan itself, which a compiled
module makes, and always comes to the same call: only the sequences' blocks and lengths are others.
So one call is watched, and made again with the new ones. Where it is not what is expected here, the
wrapper goes on planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlanCall:
    """The call of a module that planned a wrapper."""

    wrapper: Any
    arguments: tuple[Any, ...]
    indptr: int  # its place among them
    kv_length: int

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
        return cls(wrapper, calls[0], bounds[0], lengths[0])

    def again(self, indptr: Tensor, kv_length: Tensor) -> None:
        """For as many sequences, of which these are the figures now."""
        arguments = list(self.arguments)
        arguments[self.indptr], arguments[self.kv_length] = indptr, kv_length
        self.wrapper._plan_info = self.wrapper._cached_module.plan(*arguments)


def _are_the_same(argument: Any, kv_length: Tensor) -> bool:
    if not isinstance(argument, Tensor) or argument.device != kv_length.device:
        return False
    return argument.dtype == kv_length.dtype and torch.equal(argument, kv_length)
