"""Ray Serve's router as we want it: it asks each replica what the request would cost there, and
takes the one where all answers together are delayed least, as our coordinator does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from megatron_hybrid.ray.messages import MOST_BYTES, Asked, Price
from megatron_hybrid.ray.routes import has_prompt

# A replica that has not answered by then is taken only if no other one answers.
ASK_SECONDS = 2.0
# A request that was sent so long before a replica was asked has come there first.
ON_ITS_WAY_SECONDS = 0.05

logger = logging.getLogger(__name__)


class SkippingRouter(RequestRouter):
    """The place for requests that `Ingress` forwards."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray."""
        self._numbers = itertools.count()
        # When a request was given to which replica, and its tokens to compute there.
        self._given: deque[tuple[float, Any, int]] = deque()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica after the other, the best first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if len(candidate_replicas) < 2 or not isinstance(asked, Asked) or not has_prompt(asked):
            return [self._by_queue(candidate_replicas)[:1], candidate_replicas]
        since = time.monotonic() - ON_ITS_WAY_SECONDS
        while self._given and self._given[0][0] < since - ASK_SECONDS:
            self._given.popleft()
        replicas = list(candidate_replicas)
        prices = await asyncio.gather(*(self._ask(one, asked) for one in replicas))
        known = [
            (self._cost(price, replica, since), price.blocks, number, replica, price)
            for number, (replica, price) in enumerate(zip(replicas, prices, strict=True))
            if price is not None
        ]
        if not known:  # it can't be served, or all are slow
            return [[one] for one in self._by_queue(replicas)]
        known.sort(key=lambda one: one[:3])
        *_, best, price = known[0]
        self._given.append((time.monotonic(), best.replica_id, price.tokens - price.skips))
        rest = [replica for replica in replicas if replica is not best]
        return [[best], *([one[3]] for one in known[1:]), rest]

    async def _ask(self, replica: RunningReplica, asked: Asked) -> Price | None:
        name = f"{asked.name}-ask-{next(self._numbers)}"
        request = PendingRequest(
            args=[asked],
            kwargs={},
            metadata=RequestMetadata(
                request_id=name,
                internal_request_id=name,
                call_method="ask",
                app_name=self.app_name,
                # By gRPC, where the request fits.
                _by_reference=len(asked.body) > MOST_BYTES,
                _on_separate_loop=False,
            ),
        )
        try:
            result = replica.try_send_request(request, with_rejection=False)
            price: Price | None = await asyncio.wait_for(result.get_async(), ASK_SECONDS)
        except Exception as error:  # it is gone, or slow: others are there
            logger.info("%s did not say what a request would cost: %r", replica.replica_id, error)
            return None
        return price

    def _cost(self, price: Price, replica: RunningReplica, since: float) -> float:
        """With what it did not know of yet when it was asked."""
        on_its_way = [
            tokens
            for when, given, tokens in self._given
            if when >= since and given == replica.replica_id
        ]
        own = price.tokens - price.skips
        return price.delay + sum(on_its_way) + len(on_its_way) * own

    def _by_queue(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """The one with the fewest requests first, as far as is known here."""
        return sorted(
            replicas, key=lambda one: self.replica_queue_len_cache.get(one.replica_id) or 0
        )
