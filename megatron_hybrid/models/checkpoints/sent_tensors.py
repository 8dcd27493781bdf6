"""Tensors that somebody sends, one after the other: what they are is known before they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError


class TensorInfo(NamedTuple):
    """Of a tensor that is to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """That its values take."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class SentTensors:
    """`infos`: of all tensors by name, in the order in which they come. `receive`: begins to take
    them in, and yields each with its name; a tensor may be written over once the next one is asked
    for, unless it is `kept`. Those that are there can be read from `held`."""

    where = "what was sent"
    # Whether all can be read before they are received. If not, nobody goes on before they were, as
    # in a broadcast: they are taken in even if they are of no use.
    is_there = False

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        receive: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        self.infos = infos
        self._receive = receive
        self._called: Callable[[str], str] = str
        self.held: dict[str, Tensor] = {}

    def rename(self, called: Callable[[str], str]) -> None:
        """Go by other names from now on. Raises WeightsError for two tensors that have one."""
        names = {called(name): name for name in self.infos}
        if len(names) < len(self.infos):
            double = set(self.infos) - set(names.values())
            raise WeightsError(f"Weight {min(double)!r} is there twice in {self.where}.")
        self.infos = {new: self.infos[name] for new, name in names.items()}
        self.held = {called(name): tensor for name, tensor in self.held.items()}
        self._called = called

    def arrivals(self) -> Iterator[str]:
        """The names, each when its tensor is in `held`, until `drop`. Raises WeightsError for
        tensors that are not those that were described."""
        expected = iter(self.infos.items())
        for sent_as, tensor in self._receive():
            name = self._called(sent_as)
            wanted, info = next(expected, (None, None))
            if name != wanted or info is None:
                raise WeightsError(f"Weight {name!r} came where {wanted!r} was to come.")
            if (tensor.dtype, tuple(tensor.shape)) != info:
                raise WeightsError(
                    f"Weight {name!r} came as {tensor.dtype} of shape {list(tensor.shape)}; it was "
                    f"to be {info.dtype} of shape {list(info.shape)}."
                )
            self.held[name] = tensor.detach()
            yield name
        if (missing := next(expected, None)) is not None:
            raise WeightsError(f"Weight {missing[0]!r} did not come.")

    def keep(self, name: str) -> None:
        """It is wanted for longer than until the next one comes."""
        self.held[name] = self.held[name].clone()

    def drop(self, name: str) -> None:
        """It is not wanted any more."""
        del self.held[name]

    def refuse(self) -> None:
        """None of it is wanted."""
        if not self.is_there:
            for _ in self._receive():
                pass


class GivenTensors(SentTensors):
    """Tensors that are all there, in memory, on any device and in any dtype."""

    where = "the tensors given"
    is_there = True

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Raises WeightsError for what is no mapping of names to tensors, and no pairs of them."""
        given = dict[str, Tensor]()
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise WeightsError(
                    "Weights in memory are pairs of a name and a torch tensor, not of "
                    f"{type(name).__name__} and {type(tensor).__name__}."
                )
            given[name] = tensor.detach()
        infos = {name: TensorInfo(one.dtype, tuple(one.shape)) for name, one in given.items()}
        super().__init__(infos, given.items)
        self.held = dict(given)
