"""MooncakeStore: objects in the memory of other processes and machines, by Mooncake's store.

A master knows what lies where; every process may add memory and talks with the others about the
data. The master drops what was not used for long when the memory is full.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megatron_hybrid.cache.calls import Calls
from megatron_hybrid.cache.stores.parts import checksum_of, length_of, views_of
from megatron_hybrid.errors import ConfigurationError, StoreError

logger = logging.getLogger(__name__)

FLAG = "--prefix-caching-store"
LEAST_BUFFER = 128 << 20
RETRY_SECONDS = 1.0  # of what others may have been replacing meanwhile
REACH_SECONDS = 3.0  # for a connection to the master, before the client is asked to make one

# What the client waits for, unless the environment says otherwise: by itself it is up to 30 s for
# an answer of the master or for data, and up to 600 s until it gives up to find the master.
CLIENT_SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
}

_HEADER = struct.Struct("<4sIQB32s")  # magic, checksum and length of the data, length of the key
_MAGIC = b"mhy1"
_PREFIX = "megatron_hybrid/"  # of names; others may use the same store

# Data pass through the client's buffer, and a call fails if it does not fit at the moment. Four
# of up to an eighth do: beside three of them there is a hole of 5/32 at least, wherever they lie.
_TURNS = 4
_SMALL = 8  # a small object is at most this part of the buffer

_MAX_REMEMBERED = 1 << 17  # objects whose sizes are known, for usage()

_NO_SPACE = -200
_NO_TRANSFER = -800
_ABSENT = -703, -704, -710, -712  # not there, not yet, or not any more
_OTHER_WRITES = -601, -705  # another process is storing the same, or has just done so
_MEANINGS = {
    -1: "an internal error of the client",
    -10: "its buffer is full",
    -101: "no process has added memory to the store",
    -103: "the master does not know this process",
    -200: "there is no room",
    -600: "it was refused, as an object larger than the client's buffer is",
    -601: "another process is writing the object",
    -703: "it is being written",
    -704: "it is not there",
    -705: "it is there already",
    -706: "it is being read",
    -707: "it took longer than the master keeps an object for a reader",
    -800: "the data could not be sent to the process, or had from it, whose memory it is",
    -900: "the master can't be reached",
    -901: "the master did not answer in time",
    -1010: "the master is not ready",
}


class MooncakeStore:
    """An ObjectStore. Its threads' calls run side by side as far as the client's buffer allows.

    A call fails after about 5 s if the master does not answer, and after 10 s if the process that
    has the data does not. When a master has come back, the store is empty and goes on. What other
    processes hold stays after `close()`; what lies in the memory that this one added does not."""

    max_bytes = 0  # only the master knows

    def __init__(
        self,
        address: str,
        *,
        name: str = "mooncake",
        segment_bytes: int = 0,
        buffer_bytes: int = LEAST_BUFFER,
        protocol: str = "tcp",
        local_host: str = "127.0.0.1",
        client: Any = None,
    ) -> None:
        """address: mooncake://MASTER_HOST:PORT. segment_bytes: memory that this process adds to
        the store; 0: none, so another one must. buffer_bytes: through which data go; an object
        must fit into it. protocol: "tcp" or "rdma". local_host: under which the others reach this
        process. client: a MooncakeDistributedStore (None: a new one).

        Raises ConfigurationError, if the package is missing or there is no master."""
        self.name = name
        self.address = address
        self._buffer_bytes = buffer_bytes
        self._calls = Calls(_TURNS)  # after the last one, another would end this process
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}  # what this process has put, as far as it knows
        self._bytes = 0
        host, port = _host_and_port(address)
        for variable, value in CLIENT_SETTINGS.items():
            os.environ.setdefault(variable, value)
        self._client: Any = _new_client(address) if client is None else client
        _check_reachable(address, host, port)
        master = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        code = self._client.setup(
            local_host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, "", master
        )
        if code:
            raise ConfigurationError(
                f"{FLAG} {address}: Mooncake's client could not be set up with {segment_bytes} "
                f"bytes for the store, a buffer of {buffer_bytes} bytes, protocol {protocol!r} and "
                f"host {local_host!r}: {_meaning(code)}. See whether a mooncake_master answers "
                "there, and to the memory of this machine."
            )

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the master knows each. Raises StoreError."""
        if not keys:
            return []
        with self._calls.call():
            codes = self._client.batch_is_exist([_name(key) for key in keys])
        for key, code in zip(keys, codes, strict=True):
            if code < 0:
                raise self._failure("look for", key, code)
            if not code:
                self._forget(key)
        return [code > 0 for code in codes]

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill contiguous `parts`; False if nothing is there or it is not whole, after which it is
        removed and the log says so. Raises StoreError."""
        views = views_of(parts)
        return self._fetch(key, views) is not None

    def read(self, key: bytes) -> bytes | None:
        """All that is there, of any size; None as False above. Raises StoreError."""
        return self._fetch(key, None)

    def put(self, key: bytes, parts: Sequence[memoryview | bytes]) -> bool:
        """Store contiguous `parts`; False if there is no room in any one process's memory. What is
        being read at the moment can't be dropped, nor what was replaced while it was. Raises
        StoreError, too, if it is larger than the buffer."""
        views = views_of(parts)
        length = length_of(views)
        size = _HEADER.size + length
        self._check_fits(key, size)
        header = _header(key, length, checksum_of(views))
        with self._calls.call(self._turns_for(size)):
            # not put_parts, which leaves what is there and says that all went well
            deadline = time.monotonic() + RETRY_SECONDS
            while (code := self._client.upsert_parts(_name(key), header, *views)) in _ABSENT:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)  # another process replaced or removed it meanwhile
        if code == _NO_SPACE:
            return False
        if code and code not in _OTHER_WRITES:
            raise self._failure("store", key, code)
        self._remember(key, size)
        return True

    def usage(self) -> tuple[int, int]:
        """Bytes and objects that this process has put, without those that it has found to be gone;
        the client does not say what all have."""
        with self._lock:
            return self._bytes, len(self._sizes)

    def close(self) -> None:
        """Calls that are under way are finished; later ones raise StoreError. Takes a second, and
        about 15 s if the master is gone."""
        if self._calls.close(f"The store {self.address} ({FLAG}) is closed."):
            self._client.close()

    def _fetch(self, key: bytes, views: list[memoryview] | None) -> bytes | None:
        """What is stored under a key, or b"" after it went into `views`; None: it is not there, or
        wrong."""
        name = _name(key)
        # Its size first: only from this one's code can a miss be told from a failure.
        with self._calls.call():
            size = self._client.get_size(name)
        if not self._is_there(key, size):
            return None
        length = size - _HEADER.size
        if length < 0 or (views is not None and length != length_of(views)):
            self._remove_wrong(key, f"it has {size} bytes, which it should not")
            return None
        self._check_fits(key, size)
        with self._calls.call(self._turns_for(size)):
            # not get(), which holds the interpreter's lock until the data are there
            deadline = time.monotonic() + RETRY_SECONDS
            while (buffer := self._client.get_buffer(name)) is None:
                if not self._is_there(key, self._client.get_size(name)):
                    return None
                if time.monotonic() > deadline:
                    raise self._failure("read", key, _NO_TRANSFER)
                time.sleep(0.05)  # it was being replaced, perhaps
            result = _content(key, buffer, views)
            del buffer  # its place in the client's buffer is free before the turn ends
        if result is None:
            self._remove_wrong(key, "its header or its checksum is another")
        return result

    def _is_there(self, key: bytes, code: int) -> bool:
        """What a size or a code says. Raises StoreError."""
        if code >= 0:
            return True
        if code not in _ABSENT:
            raise self._failure("read", key, code)
        self._forget(key)
        return False

    def _remove_wrong(self, key: bytes, reason: str) -> None:
        """So that it is not found, and not read, again and again."""
        logger.warning("%s is not used and removed from %s: %s.", _name(key), self.address, reason)
        with self._calls.call():
            self._client.remove(_name(key), True)  # although it was read just now
        self._forget(key)

    def _check_fits(self, key: bytes, size: int) -> None:
        if size > self._buffer_bytes:
            raise StoreError(
                f"{_name(key)} has {size} bytes, and the buffer of the client of {FLAG} "
                f"{self.address} only {self._buffer_bytes}: it needs a larger one."
            )

    def _turns_for(self, size: int) -> int:
        return 1 if size * _SMALL <= self._buffer_bytes else _TURNS

    def _remember(self, key: bytes, size: int) -> None:
        with self._lock:
            self._bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
            if len(self._sizes) > _MAX_REMEMBERED:  # the oldest, which the master drops first, too
                self._bytes -= self._sizes.pop(next(iter(self._sizes)))

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(key, 0)

    def _failure(self, what: str, key: bytes, code: int) -> StoreError:
        return StoreError(
            f"Could not {what} {_name(key)} in the store {self.address}: {_meaning(code)}. See to "
            f"the mooncake_master of {FLAG} and to the processes that add memory."
        )


def _new_client(address: str) -> Any:
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigurationError(
            f"{FLAG} {address} needs Mooncake, which can't be imported ({error}): install the "
            "package mooncake-transfer-engine (mooncake-transfer-engine-non-cuda without CUDA) and "
            "the libraries libibverbs1, librdmacm1 and libnuma1."
        ) from error
    return module.MooncakeDistributedStore()


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:  # no number, or more than 65535
        host = port = None
    if not host or not port or address.lower() != f"mooncake://{url.netloc}".lower():
        raise ConfigurationError(f"{FLAG} {address}: it must be mooncake://MASTER_HOST:PORT.")
    return host, port


def _check_reachable(address: str, host: str, port: int) -> None:
    """Raises ConfigurationError; the client would try for long, and only say that it failed."""
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"{FLAG} {address} can't be reached: {error}. Start a mooncake_master there, or give "
            "the address of the one that runs."
        ) from error


def _meaning(code: int) -> str:
    return f"{_MEANINGS.get(code, 'an error that only Mooncake knows')} (code {code})"


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _header(key: bytes, length: int, checksum: int) -> bytes:
    """What comes before the data: so all that can be wrong is seen in one comparison."""
    return _HEADER.pack(_MAGIC, checksum, length, len(key), key)


def _content(key: bytes, buffer: Any, views: list[memoryview] | None) -> bytes | None:
    """The data of what was read, or b"" after they went into `views`; None: it is wrong."""
    content = memoryview(buffer).cast("B")
    data = content[_HEADER.size :]
    if bytes(content[: _HEADER.size]) != _header(key, data.nbytes, checksum_of([data])):
        return None
    if views is None:
        return bytes(data)
    if data.nbytes != length_of(views):  # replaced since its size was asked for
        return None
    _copy(data, views)
    return b""


def _copy(data: memoryview, views: list[memoryview]) -> None:
    """Into `views`, one after the other. By numpy, which lets other threads run meanwhile."""
    source = np.asarray(data)
    at = 0
    for view in views:
        np.copyto(np.asarray(view), source[at : at + view.nbytes])
        at += view.nbytes
