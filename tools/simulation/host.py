"""Host memory behind a simulated pool."""

from __future__ import annotations

from megatron_hybrid.cache.host_store import page_bytes
from megatron_hybrid.cache.host_tier import Copy, HostTier
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.replay_cost import queue_of
from megatron_hybrid.engine.transfers import HostTransfers
from simulation.pools import ModelShape

PEAK_SHARE = 400e12  # operations a second of a GPU that computes prompts
HOST_RATE = 50e9  # bytes a second between the GPU and host memory: PCIe 5


class _Copies:
    """What they copy is there in the next step: 25 ms are enough for a gigabyte."""

    def write(self, copy: Copy) -> _Copies:
        return self

    def begin_step(self, step: int) -> None:
        pass

    def fetch(self, copy: Copy) -> _Copies:
        return self

    def is_done(self) -> bool:
        return True


def with_host_memory(cache: HybridCache, host_bytes: int, shape: ModelShape) -> HostTransfers:
    """Of so many bytes, beside a cache of this model's."""
    seconds_per_token = 2 * shape.parameters / PEAK_SHARE
    tier = HostTier(
        cache.store,
        host_bytes // page_bytes(cache.geometry),
        queue_of("replay_cost"),
        bytes_per_token=seconds_per_token * HOST_RATE,
    )
    return HostTransfers(cache, tier, _Copies())
