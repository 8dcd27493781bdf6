"""What a process may take is what the machine has, or less: as its control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hybrid.engine import host_memory
from megatron_hybrid.engine.host_memory import available_memory

MIB = 2**20
V2 = "30 23 0:26 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 MiB are free."""
    monkeypatch.setattr(host_memory, "_machine_available", lambda: 1000 * MIB)


def make(root: Path, own: str, mounts: str, files: dict[str, object]) -> Path:
    """A system: /proc/self/cgroup, /proc/self/mountinfo, and files under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own + "\n")
    (root / "proc/self/mountinfo").write_text(mounts + "\n")
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def left(tmp_path: Path, own: str, mounts: str, files: dict[str, object]) -> int:
    """MiB."""
    return available_memory(make(tmp_path, own, mounts, files)) // MIB


def v2(folder: str, limit: int | str, used: int, cached: int = 0) -> dict[str, object]:
    """One group's files, from MiB."""
    return {
        f"{folder}memory.max": limit if isinstance(limit, str) else limit * MIB,
        f"{folder}memory.current": used * MIB,
        f"{folder}memory.stat": f"anon 5\ninactive_file {cached * MIB}\nactive_file 0",
    }


def v1(folder: str, limit: int, used: int) -> dict[str, object]:
    return {
        f"memory/{folder}memory.limit_in_bytes": limit * MIB,
        f"memory/{folder}memory.usage_in_bytes": used * MIB,
    }


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 1000 * MIB
    assert left(tmp_path, "0::/", V2.format(inside="/"), {}) == 1000


def test_the_groups_limit_less_what_is_used_counts(tmp_path: Path) -> None:
    files = v2("a/b/", 700, 200)
    assert left(tmp_path, "0::/a/b", V2.format(inside="/"), files) == 500


def test_files_in_memory_make_room_when_it_is_needed(tmp_path: Path) -> None:
    files = v2("a/", 700, 690, cached=600)
    assert left(tmp_path, "0::/a", V2.format(inside="/"), files) == 610


def test_the_narrowest_of_the_groups_around_it_counts(tmp_path: Path) -> None:
    files = v2("a/b/c/", "max", 10) | v2("a/b/", 900, 100) | v2("a/", 400, 100) | v2("", 999, 0)
    assert left(tmp_path, "0::/a/b/c", V2.format(inside="/"), files) == 300


def test_a_group_that_is_overdrawn_leaves_nothing(tmp_path: Path) -> None:
    assert left(tmp_path, "0::/a", V2.format(inside="/"), v2("a/", 100, 150)) == 0


def test_the_first_version_beside_the_second(tmp_path: Path) -> None:
    own = "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/c"
    mounts = V1.format(inside="/") + "\n" + V2.format(inside="/").replace("cgroup rw", "u rw")
    files = v1("a/b/", 2**43, 100) | v1("a/", 450, 50) | v2("c/", 800, 100)
    assert left(tmp_path, own, mounts, files) == 400


@pytest.mark.parametrize("own", ["4:memory:/docker/abc", "4:memory:/", "4:memory:/../other"])
def test_in_a_container_the_group_itself_is_mounted(tmp_path: Path, own: str) -> None:
    inside = "/docker/abc" if "docker" in own else "/"
    assert left(tmp_path, own, V1.format(inside=inside), v1("", 300, 50)) == 250


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    own, mounts = "0::/a\nnonsense\n4:memory", V2.format(inside="/") + "\nshort - line\n"
    files = {"a/memory.max": "many", "a/memory.current": 7, "memory.max": 5 * MIB}
    assert left(tmp_path, own, mounts, files) == 1000


def test_of_this_machine_something_is_left() -> None:
    assert 0 < available_memory() <= 1000 * MIB
