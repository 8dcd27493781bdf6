"""The calls of CUDA's driver for virtual memory, which torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_LEAST = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class DriverError(RuntimeError):
    """A call that failed."""


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # noqa: RUF012


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [  # noqa: RUF012
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]  # noqa: RUF012


class Driver:
    """Addresses are integers, sizes bytes, memory a handle. Raises DriverError, or MemoryError."""

    def __init__(self) -> None:
        """Raises OSError where there is no driver."""
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def granule(self, device: int) -> int:
        """What sizes and addresses have to be multiples of."""
        found = ctypes.c_size_t()
        properties = _properties(device)
        self._call("MemGetAllocationGranularity", ctypes.byref(found), properties, _LEAST)
        return found.value

    def reserve(self, size: int) -> int:
        """Addresses without memory."""
        address, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        size_, alignment = ctypes.c_size_t(size), ctypes.c_size_t(0)
        self._call("MemAddressReserve", ctypes.byref(address), size_, alignment, zero, zero)
        return address.value

    def free(self, address: int, size: int) -> None:
        """What was reserved."""
        self._call("MemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(size))

    def create(self, device: int, size: int) -> int:
        """Memory without an address."""
        found, flags = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        size_ = ctypes.c_size_t(size)
        self._call("MemCreate", ctypes.byref(found), size_, _properties(device), flags)
        return found.value

    def release(self, memory: int) -> None:
        """Give it back; it goes when it has no address."""
        self._call("MemRelease", ctypes.c_ulonglong(memory))

    def map(self, address: int, size: int, memory: int) -> None:
        """Memory at an address."""
        self._call(
            "MemMap",
            ctypes.c_ulonglong(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            ctypes.c_ulonglong(memory),
            ctypes.c_ulonglong(0),
        )

    def unmap(self, address: int, size: int) -> None:
        """No memory there any more."""
        self._call("MemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(size))

    def allow(self, device: int, address: int, size: int) -> None:
        """The device may read and write there."""
        access = _Access(_Location(_DEVICE, device), _READ_AND_WRITE)
        address_, size_ = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        self._call("MemSetAccess", address_, size_, ctypes.byref(access), ctypes.c_size_t(1))

    def synchronize(self, device: torch.device | None) -> None:
        """Wait for all that the device has to do; None: the current one."""
        torch.cuda.synchronize(device)

    def tensor(self, array: Any, device: torch.device) -> Tensor:
        """Of an object with __cuda_array_interface__, which the tensor keeps; its memory has to be
        there now."""
        return torch.as_tensor(array, device=device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._cuda, f"cu{name}")(*arguments))
        if not code:
            return
        words = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(words))
        text = f"cu{name} failed: {(words.value or b'unknown error').decode()} ({code})."
        raise MemoryError(text) if code == _OUT_OF_MEMORY else DriverError(text)


def _properties(device: int) -> Any:
    location = _Location(_DEVICE, device)
    return ctypes.byref(_Properties(_PINNED, 0, location, None, (ctypes.c_ubyte * 8)()))
