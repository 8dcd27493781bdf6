"""DynamicInferenceEngine: submit requests, call step until there is no work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointHints
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.scheduler import Scheduler
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.errors import DeviceLostError, InvalidRequestError
from megatron_hybrid.execution.plan import Runner
from megatron_hybrid.execution.random_streams import stream_seed
from megatron_hybrid.request import (
    RequestEvent,
    SamplingParams,
    validate_cache_checkpoints,
    validate_priority,
    validate_prompt,
)

logger = logging.getLogger(__name__)


class DynamicInferenceEngine:
    """One rank's engine. All ranks of a model-parallel group make the same calls in the same order.

    `build_engine` makes one from an EngineConfig.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 1234,
        chunked_prefill: bool = True,
        break_at_checkpoints: bool = False,
        log_interval: int = 0,
    ) -> None:
        self.context = context
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_seq_length = context.max_seq_length
        self.eos_token_ids = eos_token_ids
        self.statistics = Statistics(context.cache)
        self.scheduler = Scheduler(
            context,
            self.statistics,
            chunked_prefill=chunked_prefill,
            break_at_checkpoints=break_at_checkpoints,
        )
        self._seed = seed
        self._chunked_prefill = chunked_prefill
        self._log_interval = log_interval
        self._submitted = 0

    # --------------------------------------------------------------- the loop

    def step(self) -> list[RequestEvent]:
        """Run one step and return what it did: new tokens and the ends of requests."""
        plan = self.scheduler.schedule()
        events = self.scheduler.take_events()
        if plan.is_empty:
            return events
        try:
            result = self.runner.execute(plan)
        except DeviceLostError:
            raise  # nothing can be computed any more
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            events += self.scheduler.fail(plan, error)
        else:
            events += self.scheduler.commit(plan, result)
            self._log()
        return events

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work

    def dummy_forward(self) -> None:
        """An idle step: run the model for nobody. Cache, counters and requests stay."""
        self.runner.dummy_forward()

    # --------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        adapter: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        message_ends: Sequence[int] = (),
    ) -> None:
        """Queue a request. Raises InvalidRequestError, without effect, if it can't be served.

        cache_salt, adapter: only prompts with the same ones share anything. priority: a smaller
        number runs first; who waits long gets ahead all the same. cache_checkpoints: positions in
        the prompt at which its state is wanted later. message_ends: where the messages of a chat
        end, ascending, the system message's first; a hint for where to keep states.
        """
        params.validate()
        validate_prompt(prompt_token_ids, self.vocab_size, self.max_seq_length)
        validate_priority(priority)
        validate_cache_checkpoints(cache_checkpoints, len(prompt_token_ids))
        if self.scheduler.knows(request_id):
            raise InvalidRequestError("request_id", f"request_id {request_id!r} is in use.")
        length = len(prompt_token_ids)
        room = self.max_seq_length - length
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise InvalidRequestError(
                "max_tokens",
                f"max_tokens is {max_tokens} and the prompt has {length} tokens; together they may "
                f"be at most {self.max_seq_length} (--inference-max-seq-length).",
            )
        if not self._chunked_prefill and length > self.context.max_tokens:
            raise InvalidRequestError(
                "prompt",
                f"prompt has {length} tokens; without --enable-chunked-prefill the limit is "
                f"{self.context.max_tokens} (--inference-dynamic-batching-max-tokens).",
            )
        stop_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_ids += tuple(t for t in self.eos_token_ids if t not in stop_ids)
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        seed = self._next_seed(params)
        answers = [
            TrackedRequest(
                request_id=request_id,
                prompt=prompt,
                params=params,
                seed=stream_seed(seed, index) if index else seed,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                index=index,
                cache_salt=cache_salt,
                adapter=adapter,
                priority=priority,
                hints=CheckpointHints(tuple(cache_checkpoints), tuple(message_ends)),
            )
            for index in range(params.n)
        ]
        total = answers[0].total_tokens
        if not self.context.cache.can_ever_fit(total):
            geometry = self.context.geometry
            raise InvalidRequestError(
                "max_tokens" if geometry.blocks_for(length) <= geometry.num_blocks else "prompt",
                f"The request may need KV for {total} tokens; the cache holds "
                f"{geometry.num_blocks * geometry.block_size} "
                "(--inference-dynamic-batching-buffer-size-gb).",
            )
        self.scheduler.submit(answers)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers; the last event comes with the next step. Unknown
        ids are ignored."""
        self.scheduler.abort(request_id, index)

    # ------------------------------------------------------------------ whole

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of now; see docs/prefix_cache.md."""
        return {
            "requests_running": self.scheduler.num_running,
            "requests_waiting": self.scheduler.num_waiting,
            **self.statistics.as_dict(),
        }

    def reset(self, preserve_prefix_cache: bool = False) -> None:
        """Empty the prefix cache (unless preserved). Running requests go on; those that began
        before their cache was emptied publish nothing."""
        self.context.reset(preserve_prefix_cache)

    def reset_prefix_cache(self) -> None:
        self.reset()

    def check_integrity(self) -> None:
        """Assert every invariant of the cache; call between steps."""
        self.context.check_integrity(self.scheduler.holds)

    def _next_seed(self, params: SamplingParams) -> int:
        self._submitted += 1
        if params.seed is not None:
            return params.seed % 2**64
        return stream_seed(self._seed, self._submitted)

    def _log(self) -> None:
        if self._log_interval and self.statistics.totals["steps"] % self._log_interval == 0:
            logger.info("%s", self.statistics.log_line())
