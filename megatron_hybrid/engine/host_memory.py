"""How much memory this process may still take: what the machine has, and what the control groups
of Linux allow, which kill what takes more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Files(NamedTuple):
    """Names of what one version of control groups says about memory."""

    limit: str
    usage: str
    cached: tuple[str, ...]  # in memory.stat: parts of the usage that are given back when needed


_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: the least of what the machine has left and of what each control group that this
    process is in has. What cannot be read is no limit. `root`: where proc and sys are."""
    return max(0, min([_machine_available(), *_left_in_groups(root)]))


def _machine_available() -> int:
    return int(psutil.virtual_memory().available)


def _left_in_groups(root: Path) -> Iterator[int]:
    for folder, files in _groups(root):
        with contextlib.suppress(OSError, ValueError):
            limit = (folder / files.limit).read_text().strip()
            if limit != "max":
                used = int((folder / files.usage).read_text())
                yield int(limit) - used + _cached(folder, files)


def _cached(folder: Path, files: _Files) -> int:
    """Files that were read (a checkpoint, for instance) and are kept while nobody needs room."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        figures = dict(line.split() for line in lines)
        return sum(int(figures.get(name, 0)) for name in files.cached)
    except (OSError, ValueError):
        return 0


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Folders of this process's groups that count memory, and of those around them."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in own:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        for top, inside in _mounts(mounts, files):
            mounted = root / top.lstrip("/")
            # In a container only the group itself may be mounted, under the name of the whole.
            parts, outer = Path(path).parts[1:], Path(inside).parts[1:]
            is_inside = parts[: len(outer)] == outer and ".." not in parts
            folder = mounted.joinpath(*parts[len(outer) :]) if is_inside else mounted
            while folder != mounted:
                yield folder, files
                folder = folder.parent
            yield mounted, files


def _mounts(lines: list[str], files: _Files) -> Iterator[tuple[str, str]]:
    """(mount point, what of the hierarchy is mounted there)."""
    for line in lines:
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 3:
            continue
        is_v1 = right[0] == "cgroup" and "memory" in right[2].split(",")
        if right[0] == "cgroup2" if files is _V2 else is_v1:
            yield left[4], left[3]
