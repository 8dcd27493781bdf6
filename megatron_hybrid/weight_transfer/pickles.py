"""What trainers pickle, read without running anything that it names: a pickle may call any function
of any module. Here a few harmless names are looked up; a Named stands in for functions that make
tensors out of shared memory, which handles.py reads; anything else is refused."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import TensorInfo

_VLLM_ID = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
_ID_BYTES = 128


_KNOWN = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}


class Call(NamedTuple):
    """A function that a pickle names, and what it is called with: nobody calls it."""

    function: str
    arguments: tuple[Any, ...]


class Record:
    """Stands in for an object of a class of a trainer's: its attributes, by name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)


class _Unpickler(pickle.Unpickler):
    """`more`: what else is looked up."""

    def __init__(self, data: bytes, more: dict[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._more = more

    def find_class(self, module: str, name: str) -> Any:
        for known in (self._more, _KNOWN):
            if (module, name) in known:
                return known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise WeightsError(f"It names {module}.{name}, which is not read here.")


def read(data: bytes, what: str, more: dict[tuple[str, str], Any]) -> Any:
    """The object in a pickle. `what`: it is, for messages. Raises WeightsError."""
    try:
        return _Unpickler(data, more).load()
    except Exception as error:  # a broken pickle raises almost anything
        raise WeightsError(f"{what} cannot be read: {error}") from error


def recorded(function: str) -> Callable[..., Call]:
    """What stands in for a function in a pickle."""
    return lambda *arguments: Call(function, arguments)


# ------------------------------------------------------------------ NCCL's id


def read_nccl_id(data: bytes) -> bytes:
    """[128 bytes] that rank 0 of vLLM's StatelessProcessGroup has shared: a ctypes structure,
    pickled. Raises WeightsError."""
    found = read(
        data,
        "NCCL's id",
        {("_ctypes", "_unpickle"): lambda kind, state: state[1], _VLLM_ID: Record},
    )
    if not isinstance(found, bytes) or len(found) != _ID_BYTES:
        raise WeightsError(f"NCCL's id has to be {_ID_BYTES} bytes.")
    return found


def written_nccl_id(data: bytes) -> bytes:
    """As `read_nccl_id` reads it."""
    # By its opcodes, since the class that it names is nowhere here.
    module, name = _VLLM_ID
    head = b"\x80\x03c_ctypes\n_unpickle\n" + f"c{module}\n{name}\n".encode()
    return head + b"}" + b"C" + bytes([_ID_BYTES]) + data + b"\x86\x86R."


# ------------------------------------------------------------------ prime-rl


def read_prime_infos(data: bytes) -> dict[str, TensorInfo]:
    """Of a state dict that comes, {type: [(name, shape, numbers)]}. Raises WeightsError."""
    found = read(data, "The description of tensors", {})
    try:
        return {
            str(name): TensorInfo(dtype, tuple(map(int, shape)))
            for dtype, tensors in found.items()
            for name, shape, _ in tensors
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise WeightsError(f"The description of tensors is of another form: {error}") from error
