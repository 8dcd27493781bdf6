"""DynamicInferenceContext: what one engine holds. The cache, the rows of running requests, and the
budgets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache, Lease
from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.cache.prefix_index import PrefixMatch
from megatron_hybrid.engine.tracked_request import NO_ROW, TrackedRequest
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.request import RequestStatus


class DynamicInferenceContext:
    """Requests enter by `admit` and leave by `release`; in between they own a row and a lease."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        max_tokens: int,
        max_seq_length: int,
        prefix_caching: bool = True,
    ) -> None:
        self.geometry = geometry
        self.max_tokens = max_tokens  # computed in one step
        self.max_seq_length = max_seq_length
        self.cache = HybridCache(geometry, enabled=prefix_caching)
        max_blocks = -(-max_seq_length // geometry.block_size)
        self.rows = RowTable(geometry.max_requests, max_blocks)
        self.requests: list[TrackedRequest | None] = [None] * geometry.max_requests  # by row

    # ---------------------------------------------------- Megatron's names

    @property
    def kv_block_allocator(self) -> KVBlockAllocator:
        return self.cache.kv

    @property
    def kv_hash_to_block_id(self) -> dict[BlockKey, int]:
        return self.cache.kv.kv_hash_to_block_id

    @property
    def mamba_hash_to_slot_id(self) -> dict[BlockKey, int]:
        return self.cache.states.mamba_hash_to_slot_id

    # ------------------------------------------------------------- requests

    def match(self, request: TrackedRequest) -> PrefixMatch:
        """What the cache holds of a waiting request's prompt; keys are computed once."""
        if request.keys is None or request.keys_epoch != self.cache.epoch:
            request.keys = self.cache.keys_of(request.prompt, request.cache_salt)
            request.keys_epoch = self.cache.epoch
        return self.cache.match(request.keys, request.prompt_tokens, may_skip=request.may_skip)

    def admit(self, request: TrackedRequest, match: PrefixMatch) -> bool:
        """Give a waiting request its row and lease; False, without any effect, if it must wait."""
        if not self.rows.num_free:
            return False
        assert request.keys is not None
        try:
            lease = self.cache.admit(
                match, request.keys, request.prompt_tokens, request.total_tokens
            )
        except (KVBlocksExhausted, StatePoolExhausted):
            return False
        request.lease = lease
        request.position = request.cached_tokens = lease.skip
        request.row = self.rows.take()
        request.status = RequestStatus.RUNNING
        self.requests[request.row] = request
        self._fill_row(request, lease)
        return True

    def extend_block_tables(self, decode_rows: npt.NDArray[np.int64]) -> None:
        """A block for every decoding row whose next token starts one."""
        if not self.geometry.has_attention:
            return
        rows, size = self.rows, self.geometry.block_size
        for row in decode_rows[rows.position[decode_rows] % size == 0].tolist():
            lease = self._lease(row)
            index = int(rows.position[row]) // size
            if index == len(lease.blocks):
                rows.block_table[row, index] = self.cache.extend(lease)

    def publish_decoded_blocks(self, decode_rows: npt.NDArray[np.int64]) -> None:
        """Make the blocks that the last decode completed visible."""
        if not self.cache.enabled or not self.geometry.has_attention:
            return
        rows, size = self.rows, self.geometry.block_size
        for row in decode_rows[rows.position[decode_rows] % size == 0].tolist():
            request = self.requests[row]
            assert request is not None
            self.publish_blocks(request, int(rows.position[row]))

    def publish_blocks(self, request: TrackedRequest, computed: int) -> None:
        """Make the request's full blocks below position `computed` visible."""
        assert request.lease is not None
        if self.cache.publish_blocks(request.lease, computed, request.tokens):
            self.rows.set_blocks(request.row, request.lease.blocks)

    def states_were_read(self, decode_rows: npt.NDArray[np.int64]) -> None:
        """The launched decodes read their states: from now on each reads its own slot."""
        rows = self.rows
        moved = decode_rows[rows.read_slot[decode_rows] != rows.write_slot[decode_rows]]
        for row in moved.tolist():
            lease = self._lease(row)
            self.cache.state_was_read(lease)
            rows.read_slot[row] = lease.read_slot

    def start_decoding(self, request: TrackedRequest) -> None:
        """The request's prompt is computed: from now on its row table entry drives it."""
        lease, rows, row = request.lease, self.rows, request.row
        assert lease is not None
        rows.position[row] = request.prompt_tokens
        rows.read_slot[row] = lease.read_slot
        rows.write_slot[row] = lease.live_slot
        rows.decoding[row] = True

    def release(self, request: TrackedRequest) -> None:
        """Take back a running request's row and lease. What it published stays cached."""
        assert request.lease is not None and request.row != NO_ROW
        self.cache.release(request.lease)
        self.rows.give_back(request.row)
        self.requests[request.row] = None
        request.lease, request.row = None, NO_ROW

    def running(self) -> Iterable[TrackedRequest]:
        return (request for request in self.requests if request is not None)

    # ---------------------------------------------------------------- whole

    def reset(self, preserve_prefix_cache: bool = False) -> None:
        """Empty the prefix cache, unless it is to be kept. Running requests go on; after their
        cache was emptied they publish nothing."""
        if not preserve_prefix_cache:
            self.cache.reset()

    def check_integrity(self) -> None:
        """Assert every invariant; call between steps."""
        running = list(self.running())
        leases = [request.lease for request in running if request.lease is not None]
        assert len(leases) == len(running) == self.geometry.max_requests - self.rows.num_free
        self.cache.check_integrity(leases)
        for request in running:
            lease = request.lease
            assert lease is not None and self.requests[request.row] is request
            table = self.rows.block_table[request.row, : len(lease.blocks)]
            assert table.tolist() == lease.blocks, "a row's block table differs from its lease"

    def _fill_row(self, request: TrackedRequest, lease: Lease) -> None:
        rows, row, params = self.rows, request.row, request.params
        rows.set_blocks(row, lease.blocks)
        rows.set_stop_ids(row, request.stop_ids)
        rows.generated[row] = len(request.output)
        rows.max_tokens[row] = request.max_tokens
        rows.temperature[row] = params.temperature
        rows.top_k[row] = params.top_k
        rows.top_p[row] = params.top_p
        rows.min_p[row] = params.min_p
        rows.seed[row] = request.seed
        rows.logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def _lease(self, row: int) -> Lease:
        request = self.requests[row]
        assert request is not None and request.lease is not None
        return request.lease
