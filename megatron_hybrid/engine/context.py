"""DynamicInferenceContext: what one engine holds. The cache, the rows of running requests, and the
budgets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.cache.prefix_store import PrefixMatch
from megatron_hybrid.engine.request_keys import RequestKeys
from megatron_hybrid.engine.tracked_request import Running, TrackedRequest
from megatron_hybrid.engine.transfers import Transfers
from megatron_hybrid.engine.window_rows import WindowRows
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.request import BUFFER_FLAG, CONTEXT_FLAG, RequestStatus

if TYPE_CHECKING:
    from megatron_hybrid.execution.routed_reader import RoutedReader


class DynamicInferenceContext:
    """Requests enter by `admit` and leave by `release`; in between they own a row and a lease."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        max_tokens: int,
        max_seq_length: int,
        cache: HybridCache | None = None,
        write_interval: int = 1,
    ) -> None:
        """max_seq_length: what the model's context allows; the KV pool may hold less.
        write_interval: a decoding request's states are written every so many tokens."""
        self.geometry = geometry
        self.write_interval = write_interval
        self.max_tokens = max_tokens  # computed in one step
        # The longest prompt and answer together that can be served, and the flag that says so.
        self.max_seq_length, self.max_seq_length_flag = max_seq_length, CONTEXT_FLAG
        fits = geometry.longest_sequence
        if fits is not None and fits < max_seq_length:
            self.max_seq_length, self.max_seq_length_flag = fits, BUFFER_FLAG
        self.cache = HybridCache(geometry) if cache is None else cache
        self.keys = RequestKeys(self.cache)
        max_blocks = -(-self.max_seq_length // geometry.block_size)
        self.rows = RowTable(geometry.max_requests, max_blocks, has_window=geometry.has_window)
        self.windows = WindowRows(self.rows, self.cache)
        self.requests: list[TrackedRequest | None] = [None] * geometry.max_requests  # by row
        self._admissions = 0
        self.weight_version = "0"  # what answers call the weights: see EngineWeights
        self.transfers = Transfers()  # to and from host memory
        self.routed: RoutedReader | None = None  # None: experts are not kept

    # ---------------------------------------------------- Megatron's names

    @property
    def kv_block_allocator(self) -> KVBlockAllocator:
        """All KV blocks."""
        return self.cache.kv

    @property
    def kv_hash_to_block_id(self) -> dict[BlockKey, int]:
        """The block that holds each cached key."""
        return self.cache.kv.kv_hash_to_block_id

    @property
    def mamba_hash_to_slot_id(self) -> dict[BlockKey, int]:
        """The slot that holds the state of each cached key."""
        return self.cache.states.mamba_hash_to_slot_id

    # ------------------------------------------------------------- requests

    def match(self, request: TrackedRequest) -> PrefixMatch:
        """What the cache holds of a waiting request's tokens."""
        keys = self.keys.of(request)
        return self.cache.match(keys, request.num_tokens, most=request.most_skipped)

    def admit(self, request: TrackedRequest, match: PrefixMatch, headroom: int) -> Running | None:
        """Give a waiting request its row and lease; None, without any effect, if it must wait.

        `headroom`: KV blocks that have to stay free or evictable for others.
        """
        rows, keys, length = self.rows, self.keys.of(request), request.num_tokens
        if not rows.num_free:
            return None
        try:
            lease = self.cache.admit(match, keys, length, headroom=headroom, hints=request.hints)
        except (KVBlocksExhausted, StatePoolExhausted):
            return None
        if request.output:
            lease.checkpoints = []  # it goes on from where it was; its prompt has been placed
        self._admissions += 1
        row = rows.take()
        running = Running(request, row, lease, prefill_tokens=length, admission=self._admissions)
        rows.position[row] = lease.skip
        self._fill_row(running)
        self.requests[row], request.running = request, running
        request.status = RequestStatus.RUNNING
        return running

    def rows_that_need_a_block(self) -> list[Running]:
        """Decoding requests whose next token starts a block, the most important ones first."""
        if not self.geometry.has_blocks:
            return []
        rows = self.rows
        decoding = rows.decoding.nonzero()[0]
        has_room = rows.next_position(decoding) < self.tokens_with_room(decoding)
        found = map(self.running_in, decoding[~has_room].tolist())
        return sorted(found, key=lambda running: running.importance)

    @property
    def lacks_blocks(self) -> bool:
        """Whether not every decoding request can have a place for its next token."""
        if not self.geometry.has_attention:  # window blocks are never lacking
            return False
        available = self.cache.kv.num_available
        if available >= len(self.rows.decoding) - self.rows.num_free:
            return False
        return len(self.rows_that_need_a_block()) > available

    def extend_block_table(self, running: Running) -> bool:
        """One more block for a decoding request; False if there is none."""
        if self.geometry.has_attention:
            try:
                block = self.cache.extend(running.lease)
            except KVBlocksExhausted:
                return False
            self.rows.add_block(running.row, block)
        self.windows.add_block(running)
        return True

    def tokens_with_room(self, decode_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[decodes]: what the blocks of these rows hold."""
        return self.rows.num_blocks[decode_rows] * self.geometry.block_size

    def publish_blocks(self, running: Running, computed: int) -> None:
        """Make the request's full blocks below position `computed` visible."""
        if self.cache.publish_blocks(running.lease, computed):
            self.rows.set_blocks(running.row, running.lease.blocks)

    def set_slots(self, running: Running) -> None:
        """The row of a request that decodes has the slots of its lease, which have changed."""
        self.rows.read_slot[running.row] = running.lease.read_slot
        self.rows.write_slot[running.row] = running.lease.write_slot

    def computed_tokens(self, running: Running) -> int:
        """How many tokens of a request have been computed or skipped, and are in its state."""
        return int(self.rows.position[running.row])

    def keep_end(self, running: Running, kind: str) -> None:
        """Keep the state at which a running request ends or has to stop, and its experts."""
        computed = self.computed_tokens(running)
        if self.routed is not None:
            running.request.read_experts(self.routed, running.lease.blocks, computed)
        self.cache.keep_end(running.lease, computed, kind)

    def release(self, running: Running) -> None:
        """Take back a running request's row and lease. What it published stays cached."""
        self.cache.release(running.lease)
        self.rows.give_back(running.row)
        self.windows.give_back(running)
        self.requests[running.row] = running.request.running = None

    def running_in(self, row: int) -> Running:
        """Who holds the row; somebody must."""
        request = self.requests[row]
        assert request is not None and request.running is not None
        return request.running

    def running(self) -> Iterable[Running]:
        """All who have a row, in the order of these."""
        return (request.running for request in self.requests if request and request.running)

    def _fill_row(self, running: Running) -> None:
        rows, row, request = self.rows, running.row, running.request
        params = request.params
        rows.set_blocks(row, running.lease.blocks)
        self.windows.fill_row(running)
        rows.generated[row] = len(request.output)
        rows.max_tokens[row] = request.max_tokens
        rows.temperature[row], rows.tempered[row] = params.temperature, params.tempered_logprobs
        rows.top_k[row] = params.top_k
        rows.top_p[row] = params.top_p
        rows.min_p[row] = params.min_p
        rows.seed[row], rows.adapter[row] = request.seed, request.adapter.slot
        wanted = params.logprobs if request.max_tokens else None
        rows.logprobs[row] = -1 if wanted is None else wanted
        if request.thoughts is not None:
            rows.limit(row, request.thoughts.look_at)
        if params.adjusts_logits:
            texts = request.prompt, np.asarray(request.output, dtype=np.int32)
            rows.adjust(row, params, *texts, stop_ids=request.stop_ids, grammar=request.grammar)
