"""DiskStore: objects in the files of one folder, which processes of one host may share.

An object is a safetensors file, so that any tool can look into it: the length of the header in 8
bytes, the header, and the data as one tensor of bytes.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_hybrid.cache.stores.parts import checksum_of, length_of, views_of
from megatron_hybrid.errors import ConfigurationError, StoreError

logger = logging.getLogger(__name__)

# Data begin at a page of their file, so that it can be mapped or read directly; and all headers
# are of one length, so that header and data come with one call.
HEADER_BYTES = 4096
VERSION = "1"
FLAG = "--prefix-caching-disk"

_SUFFIX = ".safetensors"
_OBJECT = re.compile(r"(?:[0-9a-f]{2}){1,32}\.safetensors")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}-\d+\.tmp")
_ABANDONED_AFTER = 3600.0  # seconds without a write: nobody is still writing it
_TOUCH_AFTER = 60.0  # seconds: the order of deletion need not be finer, and a touch is a write
_MAX_PARTS = os.sysconf("SC_IOV_MAX")  # of one system call
# O_NONBLOCK: a pipe in the place of a file must not hold us up. It does nothing to files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FILE = errno.ELOOP, errno.ENXIO  # what opening a link and a socket says
_FULL = errno.ENOSPC, errno.EDQUOT


class _File(NamedTuple):
    """An object in the folder, the least recently used ones first."""

    used: int  # ns since 1970
    path: str
    size: int


class DiskStore:
    """An ObjectStore. A folder's files are all its own, of names that are keys; others' are let be.

    What was used least recently is deleted when the budget is spent. Stores in other processes may
    use the same folder, with the same budget. A store sees what the others wrote when it looks
    through the folder: when the budget seems to be spent, and whenever it has written a twentieth
    of it. So each further store may have about a twentieth beyond the budget, for a while.
    """

    name = "disk"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """folder: made, for this user alone, if it is missing. max_bytes: of all files in it.

        Raises ConfigurationError for a folder that others can enter or that cannot be used."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._token = os.urandom(4).hex()  # containers that share a folder have the same pids
        self._counter = itertools.count()
        self._lock = threading.Lock()  # of what follows, and of deletion for room
        self._bytes = 0
        self._objects = 0
        self._in_flight = 0  # bytes that are being written, which have their room already
        self._since_scan = 0  # bytes that have been written
        try:
            _make_private(folder)
            self._scan()
        except OSError as error:
            raise ConfigurationError(
                f"{folder} ({FLAG}) can't be used: {error.strerror}."
            ) from error

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a file of each. Raises StoreError."""
        return [self._is_there(key) for key in keys]

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill contiguous `parts`; False if nothing is there or it is not whole, after which it is
        deleted and the log says so. Raises StoreError."""
        return self._read(key, views_of(parts)) is not None

    def read(self, key: bytes) -> bytes | None:
        """All that is there, of any size; None as False above. Raises StoreError."""
        views = self._read(key, None)
        return None if views is None else b"".join(views)

    def put(self, key: bytes, parts: Sequence[memoryview | bytes]) -> bool:
        """Store contiguous `parts`; False if they are more than the budget (with what is being
        written at the moment). Raises StoreError."""
        path = self._path(key)
        views = views_of(parts)
        size = HEADER_BYTES + length_of(views)
        try:
            if not self._reserve(size):
                return False
            try:
                views.insert(0, memoryview(_header(key, length_of(views), checksum_of(views))))
                self._write_where_is_room(path, views, size)
            except BaseException:
                with self._lock:
                    self._in_flight -= size
                raise
        except OSError as error:
            advice = f"the folder of {FLAG}"
            if error.errno in _FULL:
                advice = f"what else is on the disk of {FLAG}, or give that less"
            raise StoreError(
                f"{path} can't be written: {error.strerror}. See to {advice}."
            ) from error
        return True

    def usage(self) -> tuple[int, int]:
        """Bytes and objects, as of the last look at the folder and what was written since."""
        return self._bytes, self._objects

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, key: bytes) -> str:
        return os.path.join(self.folder, key.hex() + _SUFFIX)

    def _is_there(self, key: bytes) -> bool:
        path = self._path(key)
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(path, error) from error

    def _read(self, key: bytes, views: list[memoryview] | None) -> list[memoryview] | None:
        """The data, in `views` or in what is made for them; None if they are not there."""
        path = self._path(key)
        try:
            try:
                file = os.open(path, _READ)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in _NOT_A_FILE:
                    raise
                _say_it_stays(path)
                return None
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    _say_it_stays(path)
                    return None
                if views is None:
                    views = views_of([bytearray(max(0, status.st_size - HEADER_BYTES))])
                if fault := _read_checked(file, status.st_size, key, views):
                    logger.warning("%s is not what was stored: %s. It is deleted.", path, fault)
                    with self._lock:
                        self._delete(path, status.st_size)
                    return None
                if abs(time.time() - status.st_mtime) > _TOUCH_AFTER:
                    with suppress(OSError):  # the data are good all the same
                        os.utime(file)
                return views
            finally:
                os.close(file)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _write_where_is_room(self, path: str, views: list[memoryview], size: int) -> None:
        try:
            self._write(path, views, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # Something else takes the disk before the budget is spent: what is here is what can go.
            with self._lock:
                files = self._scan()
                self._delete_oldest(files, self._bytes - self._bytes // 20 - size)
            self._write(path, views, size)

    def _write(self, path: str, views: list[memoryview], size: int) -> None:
        """No fsync: it would take as long as the disk does, for what can be computed again. What a
        power cut leaves half written is told by its checksum."""
        temporary = f"{self._temporary_prefix()}{next(self._counter)}.tmp"
        temporary = os.path.join(self.folder, temporary)
        file = os.open(temporary, _CREATE, 0o600)
        try:
            try:
                if not _move_all(os.pwritev, file, views):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            finally:
                os.close(file)
            self._move_in(temporary, path, size)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _move_in(self, temporary: str, path: str, size: int) -> None:
        with self._lock:  # no scan or deletion of ours comes between the file and its count
            replaced = None
            with suppress(FileNotFoundError):
                replaced = os.lstat(path)
            os.replace(temporary, path)
            self._in_flight -= size
            self._since_scan += size
            self._bytes += size
            self._objects += 1
            if replaced is not None and stat.S_ISREG(replaced.st_mode):
                self._count_out(replaced.st_size)

    def _temporary_prefix(self) -> str:
        return f".{os.getpid()}-{self._token}-"

    def _reserve(self, size: int) -> bool:
        """Room for a file, of what was used least recently if need be; False: there can't be."""
        with self._lock:
            wanted = self._in_flight + size
            if wanted > self.max_bytes:
                return False
            spare = self.max_bytes // 20
            if self._bytes + wanted > self.max_bytes or self._since_scan > spare:
                files = self._scan()
                if self._bytes + wanted > self.max_bytes:
                    # Some more than is needed, or the next one would have to scan again.
                    self._delete_oldest(files, self.max_bytes - spare - wanted)
                    if self._bytes + wanted > self.max_bytes:
                        return False
            self._in_flight += size
            return True

    def _scan(self) -> list[_File]:
        """The files of the folder, which are counted anew. Under the lock."""
        files = []
        others = 0  # bytes that other processes are writing, or were when they were killed
        own = self._temporary_prefix()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                is_object = _OBJECT.fullmatch(entry.name)
                if not (is_object or _TEMPORARY.fullmatch(entry.name)):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if is_object:
                        files.append(_File(status.st_mtime_ns, entry.path, status.st_size))
                    elif time.time() - status.st_mtime > _ABANDONED_AFTER:
                        os.unlink(entry.path)
                    elif not entry.name.startswith(own):
                        others += status.st_size
                except FileNotFoundError:
                    continue  # deleted, or done, in the meantime
        self._bytes = others + sum(file.size for file in files)
        self._objects = len(files)
        self._since_scan = 0
        return files

    def _delete_oldest(self, files: list[_File], wanted: int) -> None:
        """Until `wanted` bytes at most are taken. Under the lock."""
        for file in sorted(files):
            if self._bytes <= wanted:
                break
            if not self._delete(file.path, file.size):
                self._count_out(file.size)  # another process was faster; we had counted it

    def _delete(self, path: str, size: int) -> bool:
        """Whether it was there. Under the lock."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        self._count_out(size)
        return True

    def _count_out(self, size: int) -> None:
        # Not below zero: another process's file, which we have not counted, may be replaced.
        self._bytes = max(0, self._bytes - size)
        self._objects = max(0, self._objects - 1)


def _make_private(folder: Path) -> None:
    """Make it and its parents where they are missing, or see that it is this user's alone. Raises
    ConfigurationError, OSError."""
    for parent in (*reversed(folder.parents), folder):
        with suppress(FileExistsError):
            if not parent.exists():
                os.mkdir(parent, 0o700)
    status = os.stat(folder)
    mode = stat.S_IMODE(status.st_mode)
    found = f"{folder} ({FLAG}), of mode {mode:04o},"
    advice = "Give a folder that does not exist yet, which is made so."
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{found} is not a folder. {advice}")
    if status.st_uid != os.geteuid() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{found} is not this user's to write. {advice}")
    if mode & 0o777 != 0o700:  # what others put there would end up in answers
        raise ConfigurationError(f"{found} must be its owner's alone, of mode 0700. {advice}")


def _header(key: bytes, length: int, checksum: int) -> bytes:
    """HEADER_BYTES of them: all that comes before `length` bytes of data."""
    header = {
        "__metadata__": {"version": VERSION, "key": key.hex(), "checksum": f"{checksum:08x}"},
        "data": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]},
    }
    rest = HEADER_BYTES - 8
    return rest.to_bytes(8, "little") + json.dumps(header).encode().ljust(rest)


def _read_checked(file: int, size: int, key: bytes, views: list[memoryview]) -> str:
    """Fill `views` from a file of `size` bytes; what is wrong with it, or "". Raises OSError."""
    length = length_of(views)
    if size != HEADER_BYTES + length:
        return f"it has {size} bytes instead of {HEADER_BYTES + length}"
    header = bytearray(HEADER_BYTES)
    if not _move_all(os.preadv, file, [memoryview(header), *views]):
        return "it ended while it was read"
    expected = _header(key, length, checksum_of(views))
    if header == expected:
        return ""
    try:
        found = json.loads(header[8:])["__metadata__"]
        for field, value in json.loads(expected[8:])["__metadata__"].items():
            if found[field] != value:
                return f"its {field} is another"
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return "its header is another"


def _move_all(
    call: Callable[[int, list[memoryview], int], int], file: int, views: list[memoryview]
) -> bool:
    """Read or write all of `views`, none of them empty, from the beginning of a file, with preadv
    or pwritev, which may do a part at a time. False: it ended before. Raises OSError."""
    left = list(views)
    position = first = 0
    while first < len(left):
        done = call(file, left[first : first + _MAX_PARTS], position)
        if not done:
            return False
        position += done
        while done and done >= left[first].nbytes:
            done -= left[first].nbytes
            first += 1
        if done:
            left[first] = left[first][done:]
    return True


def _say_it_stays(path: str) -> None:
    logger.warning("%s is not a regular file, nor ours: it is neither read nor deleted.", path)


def _unreadable(path: str, error: OSError) -> StoreError:
    return StoreError(f"{path} can't be read: {error.strerror}. See to the folder of {FLAG}.")
