"""Keys of requests that wait: computed once, a part in each step where prompts are long."""

from __future__ import annotations

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.tracked_request import TrackedRequest


class RequestKeys:
    """Of one engine."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._block_size = cache.geometry.block_size

    def of(self, request: TrackedRequest) -> SequenceKeys:
        """A waiting request's keys under the present epoch, as far as they are known."""
        epoch, first = self._cache.epoch, request.first
        if request.keys is not None and request.keys_epoch == epoch:
            return request.keys
        if first is not None and first.keys is not None and first.keys_epoch == epoch:
            request.keys = first.keys.copy_for(request.tokens, request.prompt_tokens)
        else:
            request.keys = SequenceKeys(
                self._cache.root(request.cache_salt, request.adapter.key),
                self._block_size,
                request.tokens,
                cache_salt=request.cache_salt,
                adapter=request.adapter.name,
            )
        request.keys_epoch = epoch
        return request.keys

    def hash(self, request: TrackedRequest, most: int) -> int:
        """Compute keys of a waiting request for about `most` tokens, and of a block at least, if
        any are missing; for how many tokens it did."""
        keys = self.of(request)
        known = keys.known
        keys.extend_to(min(request.num_tokens, known + max(most, self._block_size)))
        return keys.known - known

    def has(self, request: TrackedRequest) -> bool:
        """Whether a waiting request's keys, as far as any are needed, are all known."""
        if not self._cache.enabled:
            return True
        # not `of`, which would begin those of its later siblings before the first has all
        keys = request.keys
        if keys is None or request.keys_epoch != self._cache.epoch:
            return False
        return request.num_tokens - keys.known < self._block_size
