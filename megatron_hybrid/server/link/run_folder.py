"""Where the engine processes and their front end meet: a folder with the sockets and the locks.

The name holds the address that the server listens on, so a restarted engine process finds the front
end that survived the last one, and replicas find one another's. A lock is held for as long as its
process lives, however it ends: the kernel gives it up. With port 0 nobody could find the folder
again, so its name is a fresh one.

    engine-<k>        socket of replica k           engine-<k>.lock   held by its first rank
    kv-events-<k>     what replica k has cached     front_end.lock    held by the front end
    kv-replay-<k>     what was missed of that       start.lock        held by who starts or ends it
    coordinator       socket that places requests
    answers           socket of the answers' memory
    responses         socket of the memory of stored responses
    preparers         socket of the processes that read large requests
    traces            socket of the process that sends traces
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import msgspec

from megatron_hybrid.errors import ConfigurationError

LOCK_SECONDS = 1.0  # whoever looks who holds a lock holds it for an instant
LONGEST_TEMP_FOLDER = 45  # the path of a Unix socket has about 100 characters
_PLAIN_HOST = set("abcdefghijklmnopqrstuvwxyz0123456789.-")
_LONGEST_HOST = 15
_ENGINE_LOCKS = "engine-[0-9]*.lock"


class LockOwner(msgspec.Struct):
    """Who holds a lock, as written into its file."""

    pid: int
    digest: str = ""  # a front end: of its settings
    ready: bool = False  # an engine: whether it ever served
    ended: bool = False  # an engine: it ended in order, and nobody waits for its return


class Lock:
    """A file that one process holds; its children hold it on if they inherit it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, seconds: float = 0.0) -> bool:
        """Take the lock, or have it already; False if somebody else holds it for so long."""
        deadline = time.monotonic() + seconds
        while not (taken := self._try()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return taken

    def _try(self) -> bool:
        if self._file is not None:
            return True
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            # Whoever held it last may have removed the file between our two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == os.fstat(file).st_ino:
                    self._file = file
                    return True
            os.close(file)

    def write(self, owner: LockOwner) -> None:
        """Say who holds it. Only while it is held."""
        assert self._file is not None, "acquire comes first"
        content = msgspec.json.encode(owner)
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))

    def release(self) -> None:
        """Give the lock up."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        """Give the lock up, and its file. Only while it is held."""
        self._path.unlink(missing_ok=True)
        self.release()

    def owner(self) -> LockOwner | None:
        """Who holds it now; None if nobody does."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # A shared lock, so that two processes that look do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self.last_owner() or LockOwner(0)  # 0: taken a moment ago
        else:
            return None
        finally:
            os.close(file)

    def last_owner(self) -> LockOwner | None:
        """What the last one to hold it wrote, whether it holds it still or not."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=LockOwner)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


class RunFolder:
    """One server's folder; `path` exists, belongs to this user and is closed to others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.front_end_lock = Lock(path / "front_end.lock")
        self.start_lock = Lock(path / "start.lock")

    def engine_lock(self, replica: int) -> Lock:
        """The lock of this replica's first rank."""
        return Lock(self.path / f"engine-{replica}.lock")

    def engine_locks(self) -> dict[int, Lock]:
        """By number, those of all replicas that are or were here."""
        found = {int(path.stem.removeprefix("engine-")) for path in self.path.glob(_ENGINE_LOCKS)}
        return {replica: self.engine_lock(replica) for replica in sorted(found)}

    def living_engines(self) -> dict[int, LockOwner]:
        """By number, who holds the replicas' locks."""
        owners = {replica: lock.owner() for replica, lock in self.engine_locks().items()}
        return {replica: owner for replica, owner in owners.items() if owner is not None}

    @classmethod
    def for_address(cls, host: str, port: int) -> RunFolder:
        """The folder of the server on this address; ConfigurationError if it cannot be used."""
        parent = tempfile.gettempdir()
        if len(parent) > LONGEST_TEMP_FOLDER:
            parent = "/tmp"
        if port == 0:
            return cls(Path(tempfile.mkdtemp(prefix="megatron-hybrid-", dir=parent)))
        name = host.lower()
        if not set(name) <= _PLAIN_HOST or not 0 < len(name) <= _LONGEST_HOST:
            name = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        path = Path(parent, f"megatron-hybrid-{os.getuid()}-{name}-{port}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or stat.S_IMODE(found.st_mode) & 0o077
        ):
            raise ConfigurationError(
                f"{path}, where the server keeps its socket, is not a folder of this user's own "
                "that is closed to others (mode 0700); remove it, or set TMPDIR to another folder."
            )
        return cls(path)

    def endpoint(self, name: str) -> str:
        """The address of the socket with this name, for zmq."""
        return f"ipc://{self.path}/{name}"

    def engine_endpoint(self, replica: int) -> str:
        """Of the socket that takes this replica's requests."""
        return self.endpoint(f"engine-{replica}")

    def kv_events_endpoint(self, replica: int) -> str:
        """Of the socket that publishes what this replica has cached."""
        return self.endpoint(f"kv-events-{replica}")

    def kv_replay_endpoint(self, replica: int) -> str:
        """Of the socket where those events are asked for that were missed."""
        return self.endpoint(f"kv-replay-{replica}")

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
