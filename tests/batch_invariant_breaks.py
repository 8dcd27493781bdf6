"""What would break batch-invariant mode on a CPU, for tests that have to notice it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid.kernels import replay
from megatron_hybrid.kernels.paged_attention import by_key_tiles


def break_attention(patch: pytest.MonkeyPatch) -> None:
    """Tiles as long as the longest sequence."""
    original = by_key_tiles.plan

    def plan(paged: Any, shape: Any) -> Any:
        patch.setattr(by_key_tiles, "KEYS", 1 + int(paged.host.kv_length.max()) // 2)
        return original(paged, shape)

    patch.setattr(by_key_tiles, "plan", plan)


def break_scans(patch: pytest.MonkeyPatch) -> None:
    """Tiles as long as the longest."""
    original = replay.plan_tiles
    patch.setattr(
        replay, "plan_tiles", lambda packed, chunk, *, whole: original(packed, chunk, whole=False)
    )
