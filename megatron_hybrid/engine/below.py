"""Below: what an engine's host memory has below it: nothing, unless one of its subclasses."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.host_tier import Move
from megatron_hybrid.cache.lower_tier import Save
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.tracked_request import TrackedRequest


class Below:
    """Of an engine without a store below host memory: nothing comes from there."""

    @property
    def is_reading(self) -> bool:
        """Whether anybody may be waiting."""
        return False

    def must_wait(self, request: TrackedRequest, match: PrefixMatch) -> bool:
        """Whether a request, of which the device has `match`, had better wait for what comes from
        the store. Once it need not, it never does again."""
        return False

    def was_tried(self, request: TrackedRequest) -> None:
        """The request waits no more."""

    def read_ahead(self, name: str, keys: SequenceKeys, peer: str, request: str) -> None:
        """Begin to read what a peer's request computes of a prompt, for one that is to come, until
        the former has ended."""

    def is_read_ahead(self, name: str) -> bool:
        """Whether there is nothing to read for it any more, as far as this rank knows."""
        return True

    def stop_reading_ahead(self, name: str) -> None:
        """Nobody waits for it."""

    @property
    def is_underway(self) -> bool:
        """Whether `progress` says anything."""
        return False

    def progress(self) -> list[int]:
        """How far this rank is. The smaller a number, the less far: all ranks together are as far
        as the smallest ones say."""
        return []

    def end_copies(self, agreed: Sequence[int]) -> None:
        """What was read can be found in host memory from now on. agreed: as far as all ranks are;
        empty: nothing is under way."""

    def was_written(self, move: Move) -> None:
        """A prefix is in host memory from now on."""

    def saves(self) -> list[Save]:
        """What is being written."""
        return []

    def loads(self) -> list[Move]:
        """What is being read."""
        return []

    def figures(self) -> dict[str, dict[str, int]]:
        """COUNTERS and GAUGES, by its name."""
        return {}

    def close(self) -> None:
        """Nothing is asked of it any more."""
