"""NixlMemory: reads out of the host memory of other processes and machines, by NVIDIA's NIXL.

The owner registers its memory and hands out a description of it. A reader that has the description
reads any piece of the memory; the owner's Python code takes no part in that. NIXL takes the fastest
way that UCX finds: RDMA between machines, or TCP, and the kernel's copies between processes.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from megatron_hybrid.cache.calls import Calls
from megatron_hybrid.errors import ConfigurationError, StoreError

FLAG = "--disaggregation-peers"
MODULES = "nixl_cu13", "nixl_cu12"

# What the libraries do unless the environment says otherwise: by themselves they take over signals,
# write to stdout, and complain in thousands of lines about every read that is given up.
LIBRARY_SETTINGS = {
    "UCX_DEBUG_SIGNO": "0",  # SIGHUP
    "UCX_ERROR_SIGNALS": "",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "NIXL_LOG_LEVEL": "FATAL",
}

_HEADER = struct.Struct("<4sQQH")  # magic, address and length of the memory, length of the name
_MAGIC = b"mhm1"

# A transfer's first call may go on for as long as data come, so a large read is several transfers.
# What is under way when a read has to stop should arrive: over TCP, UCX ends the process of an
# owner, sometimes, that finds that its reader has left. So it is little, and there is time for it.
_BATCH_BYTES = 32 << 20
_BATCH_PIECES = 512
_BATCHES = 2
_GRACE_SECONDS = 2.0

_EAGER_POLLS = 50
_POLL_SECONDS = 0.0002
_PROGRESS_MICROSECONDS = 1000  # at 0 the owner's thread never sleeps

Piece = tuple[int, int, int]  # address in the peer's memory, address in our own, bytes


class RemoteMemory(Protocol):
    """Memory that others may read, and into which what others have is read."""

    def metadata(self) -> bytes:
        """What a reader needs to `connect`."""
        ...

    def connect(self, metadata: bytes) -> str:
        """The name by which the memory's owner is known from now on. Raises StoreError."""
        ...

    def region(self, peer: str) -> tuple[int, int]:
        """Address and bytes of a peer's memory. Raises StoreError, if it is not connected."""
        ...

    def read(self, peer: str, pieces: Sequence[Piece], seconds: float) -> None:
        """Wait until all pieces are there. Raises StoreError; either way nothing is written into
        our own memory any more."""
        ...

    def disconnect(self, peer: str) -> None:
        """Its reads that are under way end with a StoreError."""
        ...

    def close(self) -> None:
        """Nobody reads any more; reads that are under way end with a StoreError."""


class NixlMemory:
    """A RemoteMemory. All methods may be called by several threads at once.

    Each peer is read through an agent of its own: NIXL can't cancel a transfer, and one that was
    given up still writes. When the agent has ended, nothing of it does. So a read that gets stuck
    ends the connection with its peer, and all reads from it; the others are not touched."""

    def __init__(self, name: str, memory: memoryview | tuple[int, int]) -> None:
        """name: by which readers call this process; another one's is another. memory: writable and
        contiguous, or its address and bytes; it must live until `close()` has returned.

        Raises ConfigurationError, if the package is missing."""
        self.name = name
        self._memory = memory  # kept alive
        self._address, self._nbytes = _address_and_bytes(memory)
        self._nixl = _load()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._shared: Any = None  # the agent by which others read
        self._is_closed = False

    def metadata(self) -> bytes:
        """What a reader needs to `connect`, about 500 bytes. From the first call on others can
        read: a thread serves them, which needs nothing of Python. Raises ConfigurationError."""
        with self._lock:
            self._check_open()
            if self._shared is None:
                self._shared = self._new_agent(serves=True)
            name = self.name.encode()
            header = _HEADER.pack(_MAGIC, self._address, self._nbytes, len(name))
            return header + name + bytes(self._shared.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """The name of the peer. One of the same name, as from before its restart, is disconnected
        first. Takes 50 ms and, with RDMA, what it takes to register our memory.

        Raises StoreError, if there is nobody, or `metadata` is something else; a machine that does
        not answer shows at the first read only."""
        name, address, nbytes, description = _unpacked(metadata)
        try:
            agent = self._new_agent(serves=False)
        except ConfigurationError as error:
            raise StoreError(str(error)) from error
        try:
            remote = bytes(agent.loadRemoteMD(description)).decode()
        except Exception as error:
            raise StoreError(
                f"Could not connect with {name!r} to read its memory: {error}. See whether it runs "
                f"({FLAG}), and whether both have the same version of nixl."
            ) from error
        peer = _Peer(name, address, nbytes, self._nixl, agent, remote)
        del agent  # it ends when the peer lets it go
        with self._lock:
            is_closed = self._is_closed
            former = None if is_closed else self._peers.get(name)
            if not is_closed:
                self._peers[name] = peer
        if is_closed:
            peer.end("it was closed here")
            self._check_open()
        if former is not None:
            former.end("it was connected anew")
        return name

    def region(self, peer: str) -> tuple[int, int]:
        """Address and bytes of a peer's memory. Raises StoreError, if it is not connected."""
        found = self._peer(peer)
        return found.address, found.nbytes

    def read(self, peer: str, pieces: Sequence[Piece], seconds: float) -> None:
        """Wait until all pieces are there. Other threads run meanwhile.

        Raises StoreError, after which own pieces may be filled in part: if a piece lies outside of
        either memory, if `seconds` are over, or if the peer is gone or does not move any more,
        which shows 2 s later; then it is disconnected. In any case nothing is written into our own
        memory after the call has ended."""
        found = self._peer(peer)
        for remote, own, nbytes in pieces:
            if nbytes < 0 or remote < found.address or remote + nbytes > found.end_address:
                raise StoreError(
                    f"{nbytes} bytes at {remote:#x} were to be read from {peer!r}, whose memory "
                    f"has {found.nbytes} bytes at {found.address:#x}. Connect with it again, if it "
                    "was started anew."
                )
            if own < self._address or own + nbytes > self._address + self._nbytes:
                raise StoreError(
                    f"{nbytes} bytes were to be read to {own:#x}, and the memory registered for "
                    f"that has {self._nbytes} bytes at {self._address:#x}."
                )
        try:
            found.read(pieces, seconds)
        except _LostError as error:
            self._drop(found, str(error))
            raise

    def disconnect(self, peer: str) -> None:
        """Its reads that are under way end with a StoreError, within 2 s. Nothing, if it is not
        connected."""
        with self._lock:
            found = self._peers.get(peer)
        if found is not None:
            self._drop(found, "it was disconnected")

    def close(self) -> None:
        """Disconnect from all, and let nobody read any more. Readers get a StoreError."""
        with self._lock:
            self._is_closed = True
            self._shared = None
            peers = list(self._peers.values())
        for peer in peers:
            self._drop(peer, "it was closed here")

    def _drop(self, peer: _Peer, reason: str) -> None:
        peer.end(reason)
        with self._lock:
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]

    def _peer(self, name: str) -> _Peer:
        with self._lock:
            self._check_open()
            if name not in self._peers:
                raise StoreError(
                    f"{name!r} is not connected, so nothing can be read from it. See whether it "
                    f"runs ({FLAG})."
                )
            return self._peers[name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"The memory of {self.name!r} is closed to reads.")

    def _new_agent(self, serves: bool) -> Any:
        """An agent with our memory. Raises ConfigurationError."""
        nixl = self._nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = serves  # a reader's agent is to do nothing unless it is asked
        config.pthrDelay = _PROGRESS_MICROSECONDS
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        try:
            # No other one's name: an agent that finds its own in a description refuses it.
            agent = nixl.nixlAgent(f"{self.name}-{uuid.uuid4().hex}", config)
            agent.createBackend("UCX", {})
            memory = [(self._address, self._nbytes, 0, "")]
            agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, memory), [])
        except Exception as error:
            raise ConfigurationError(
                f"{FLAG}: NIXL could not register {self._nbytes} bytes at {self._address:#x}: "
                f"{error}. See to the limit of locked memory (ulimit -l) and to the variables "
                "UCX_TLS and UCX_NET_DEVICES, if they are set."
            ) from error
        return agent


class _LostError(StoreError):
    """A transfer did not end, so its agent has to."""


class _Peer:
    """A connection. `end()` returns when no call is under way and the agent is no more."""

    def __init__(
        self, name: str, address: int, nbytes: int, nixl: Any, agent: Any, remote: str
    ) -> None:
        self.name = name
        self.address, self.nbytes = address, nbytes
        self.end_address = address + nbytes
        self._nixl = nixl
        # The only reference. No local variable may have one: the frames of an exception would keep
        # the agent alive.
        self._agent = agent
        self._remote = remote
        self._calls = Calls()
        self._end_time = math.inf

    def read(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Raises StoreError, and _LostError, after which it has to be ended."""
        deadline = time.monotonic() + seconds
        running: deque[int] = deque()
        with self._calls.call():
            is_cut = False
            for batch in _batches(pieces):
                if len(running) == _BATCHES:
                    self._finish(running.popleft(), deadline)
                is_cut = bool(self._calls.closed) or time.monotonic() > deadline
                if is_cut:
                    break
                running.append(self._post(batch))
            while running:
                self._finish(running.popleft(), deadline)
            if is_cut:
                self._calls.check()
                raise self._late()

    def end(self, reason: str) -> None:
        self._end_time = min(self._end_time, time.monotonic())
        self._calls.close(f"Nothing can be read from {self.name!r} any more: {reason}")
        self._agent = None

    def _post(self, batch: np.ndarray) -> int:
        """The handle of a transfer that has started. batch: [pieces, 3]."""
        nixl = self._nixl
        zeros = np.zeros(len(batch), np.uint64)
        remote, own, nbytes = batch.T
        sources = np.stack([remote, nbytes, zeros], axis=1)
        targets = np.stack([own, nbytes, zeros], axis=1)
        try:
            handle: int = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, targets),
                nixl.nixlXferDList(nixl.DRAM_SEG, sources),
                self._remote,
                "",
                [],
            )
            self._agent.postXferReq(handle)
        except Exception as error:
            raise self._lost(error) from error
        return handle

    def _finish(self, handle: int, deadline: float) -> None:
        """Wait for a transfer, and forget it. One that failed is never released: until its agent
        ends it may write."""
        polls = 0
        try:
            while self._agent.getXferStatus(handle) != self._nixl.NIXL_SUCCESS:
                if time.monotonic() > min(deadline, self._end_time) + _GRACE_SECONDS:
                    self._calls.check()
                    raise self._late()
                polls += 1
                time.sleep(0 if polls < _EAGER_POLLS else _POLL_SECONDS)
            self._agent.releaseXferReq(handle)
        except StoreError as error:
            raise _LostError(*error.args) from error
        except Exception as error:
            raise self._lost(error) from error

    def _late(self) -> StoreError:
        return StoreError(
            f"Reading from {self.name!r} takes too long and was given up. See whether it runs "
            f"({FLAG}), and to the network between."
        )

    def _lost(self, error: Exception) -> _LostError:
        return _LostError(
            f"Could not read from {self.name!r}: {error}. It has ended, or the connection is lost; "
            f"see whether it runs ({FLAG}), and connect with it again."
        )


def _batches(pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
    """What is read by one transfer each, [pieces, 3]. Neighbours are joined."""
    batch: list[list[int]] = []
    room = _BATCH_BYTES
    for remote, own, nbytes in pieces:
        while nbytes:
            part = min(nbytes, room)
            last = batch[-1] if batch else None
            if last and last[0] + last[2] == remote and last[1] + last[2] == own:
                last[2] += part
            else:
                batch.append([remote, own, part])
            remote, own, nbytes, room = remote + part, own + part, nbytes - part, room - part
            if not room or len(batch) == _BATCH_PIECES:
                yield np.array(batch, np.uint64)
                batch, room = [], _BATCH_BYTES
    if batch:
        yield np.array(batch, np.uint64)


def _load() -> Any:
    """NIXL's own module: the one above it leaves out how long a thread sleeps."""
    for variable, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(variable, value)
    shows_errors = logging.raiseExceptions  # which the package switches off for all
    reasons = []
    for module in MODULES:
        try:
            return importlib.import_module(f"{module}._bindings")
        except ImportError as error:
            reasons.append(str(error))
        finally:
            logging.raiseExceptions = shows_errors
    raise ConfigurationError(
        f"--role prefill and {FLAG} need NIXL, which can't be imported ({'; '.join(reasons)}): "
        "install the package nixl-cu13, or nixl-cu12 beside a PyTorch for CUDA 12."
    )


def _address_and_bytes(memory: memoryview | tuple[int, int]) -> tuple[int, int]:
    if not isinstance(memory, memoryview):
        return memory
    if memory.readonly or not memory.contiguous or not memory.nbytes:
        raise ValueError("Memory for reads must be writable, contiguous and not empty.")
    return int(np.frombuffer(memory, np.uint8).ctypes.data), memory.nbytes


def _unpacked(metadata: bytes) -> tuple[str, int, int, bytes]:
    """Name, address, bytes, and what NIXL says about them. Raises StoreError."""
    try:
        magic, address, nbytes, length = _HEADER.unpack_from(metadata)
        name = metadata[_HEADER.size : _HEADER.size + length].decode()
    except (struct.error, UnicodeDecodeError):
        magic, address, nbytes, length, name = b"", 0, 0, 0, ""
    if magic != _MAGIC:
        raise StoreError(
            f"{len(metadata)} bytes do not describe the memory of a peer: it must be a "
            f"megatron_hybrid of this version ({FLAG})."
        )
    return name, address, nbytes, metadata[_HEADER.size + length :]
