"""The watch thread where the kernel lacks what it would like to have."""

from __future__ import annotations

import errno
import os

import pytest

from megatron_hybrid.rank_layout import ParallelSizes, RankLayout
from megatron_hybrid.watchdog import Watchdog
from megatron_hybrid.watchdog.rank_beat import own_beat


def test_a_process_that_cannot_be_opened_is_watched_by_its_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    layouts = [RankLayout(ParallelSizes(tensor=2), rank, 2) for rank in range(2)]
    watchdog = Watchdog(layouts[0], 5.0)
    watchdog._finder.look([own_beat(layout) for layout in layouts], 0.0)
    assert watchdog._open_processes() == set()
    assert watchdog._open_processes() == set()
