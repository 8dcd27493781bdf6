"""NCCL without torch.distributed: groups that are made as vLLM's trainers make theirs, which share
NCCL's id through a store, and nothing else."""

from __future__ import annotations

import base64
import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.weight_transfer.groups import (
    GroupAddress,
    TransferBroken,
    meet,
    wait_until,
)
from megatron_hybrid.weight_transfer.pickles import read_nccl_id, written_nccl_id

LIBRARY = "libnccl.so.2"  # torch has loaded it
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h
UINT8, FLOAT32, SUM = 1, 7, 0  # ncclDataType_t and ncclRedOp_t of nccl.h
ID_KEY = "broadcast_from/0/0"  # of vLLM's StatelessProcessGroup: rank 0's first broadcast


class NcclId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]  # noqa: RUF012


@cache
def library() -> Any:
    """NCCL, or WeightsError where there is none."""
    try:
        nccl = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise WeightsError(f"NCCL can't be loaded here ({error}): use backend gloo.") from error
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    nccl.ncclCommInitRank.argtypes = [pointer, ctypes.c_int, NcclId, ctypes.c_int]
    nccl.ncclBroadcast.argtypes = [
        pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer,
    ]  # fmt: skip
    nccl.ncclAllReduce.argtypes = [
        pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer,
    ]  # fmt: skip
    nccl.ncclCommDestroy.argtypes = nccl.ncclCommAbort.argtypes = [pointer]
    return nccl


class NcclGroup:
    """A communicator of this process's device and rank 0's."""

    def __init__(
        self,
        address: GroupAddress,
        device: torch.device,
        seconds: float,
        id_base64: str | None = None,
    ) -> None:
        """`id_base64`: of 128 bytes, where the trainer has said them; then nobody has to meet.
        `seconds`: as of TorchGroup. Raises WeightsError."""
        self._nccl, self._device, self._seconds = library(), device, seconds
        shared = self._shared_id(address, id_base64)
        self._communicator = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._check(
                self._nccl.ncclCommInitRank(
                    ctypes.byref(self._communicator), address.size, shared, address.rank
                )
            )
            # The others do it, too: NCCL connects them now.
            zero = torch.zeros(1, device=device)
            self._check(
                self._nccl.ncclAllReduce(
                    zero.data_ptr(), zero.data_ptr(), 1, FLOAT32, SUM, *self._where()
                )
            )
            self._wait()

    def _shared_id(self, address: GroupAddress, id_base64: str | None) -> NcclId:
        if id_base64 is not None:
            try:
                return NcclId.from_buffer_copy(base64.b64decode(id_base64, validate=True))
            except ValueError as error:
                raise WeightsError(
                    f"nccl_unique_id_b64 has to be {ID_BYTES} bytes in base64: {error}."
                ) from error
        self._store = meet(address, self._seconds, use_libuv=False)
        if address.rank == 0:
            made = NcclId()
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(made)))
            self._store.set(ID_KEY, written_nccl_id(bytes(made)))  # type: ignore[arg-type]
            return made
        return NcclId.from_buffer_copy(read_nccl_id(self._store.get(ID_KEY)))

    def broadcast(self, buffer: Tensor) -> None:
        """As TransferGroup."""
        place = buffer.data_ptr()
        with torch.cuda.device(self._device):
            failed = self._nccl.ncclBroadcast(place, place, buffer.nbytes, UINT8, 0, *self._where())
            if failed:
                raise TransferBroken(f"A broadcast failed: {self._words(failed)}.")
            self._wait()

    def _where(self) -> tuple[ctypes.c_void_p, int]:
        return self._communicator, torch.cuda.current_stream(self._device).cuda_stream

    def _wait(self) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        try:
            wait_until(done.query, self._seconds)
        except TransferBroken:
            self._nccl.ncclCommAbort(self._communicator)  # else its kernel waits for ever
            self._communicator = ctypes.c_void_p()
            raise

    def close(self) -> None:
        """As TransferGroup."""
        if self._communicator:
            self._nccl.ncclCommDestroy(self._communicator)
            self._communicator = ctypes.c_void_p()

    def _check(self, result: int) -> None:
        if result:
            raise WeightsError(f"NCCL refuses the group: {self._words(result)}.")

    def _words(self, result: int) -> str:
        return str(self._nccl.ncclGetErrorString(result).decode())
