"""DynamicInferenceEngine: submit requests, call step until there is no work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hybrid.cache.checkpoint_placement import CheckpointHints
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.scheduler import Received, Scheduler
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.tracked_request import TrackedRequest
from megatron_hybrid.errors import DeviceLostError, InvalidRequestError
from megatron_hybrid.execution.plan import Launched, Runner, StepPlan
from megatron_hybrid.execution.random_streams import stream_seed
from megatron_hybrid.request import (
    FinishReason,
    RequestEvent,
    SamplingParams,
    validate_cache_checkpoints,
    validate_priority,
    validate_prompt,
)

logger = logging.getLogger(__name__)


class _ResultLostError(Exception):
    """`Launched.result` raised what is its cause."""


class DynamicInferenceEngine:
    """One rank's engine. All ranks of a model-parallel group make the same calls in the same order.

    `build_engine` makes one from an EngineConfig. With an asynchronous runner one step is in flight
    between calls of `step`: the host plans the next one while the device computes.
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
        self._in_flight: tuple[StepPlan, Launched] | None = None

    # --------------------------------------------------------------- the loop

    def step(self) -> list[RequestEvent]:
        """Run one step and return what is new: tokens and the ends of requests.

        With an asynchronous runner these are of the step before. Raises DeviceLostError when
        nothing can be computed any more.
        """
        self.statistics.begin_step()
        try:
            self._step()
        except DeviceLostError:
            raise
        except _ResultLostError as lost:
            self._fail_everything(lost.__cause__ or lost)
        except BaseException as error:  # interrupted: what was launched may not be published
            self._fail_everything(error)
            raise
        return self.scheduler.take_events()

    def _step(self) -> None:
        scheduler = self.scheduler
        if self._in_flight is not None and scheduler.needs_tokens:
            scheduler.settle(self._receive())
        plan = scheduler.schedule()
        if plan.is_empty:
            scheduler.settle(self._receive())
            return
        try:
            launched = self.runner.launch(plan)
        except DeviceLostError:
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            scheduler.drop(plan)
            scheduler.settle(self._receive())
            scheduler.fail(plan.owners, error)
            return
        received = self._receive()  # of the step before, if it is in flight
        scheduler.publish(plan)
        scheduler.settle(received)
        self._in_flight = plan, launched
        if not self.runner.asynchronous:
            scheduler.settle(self._receive())
        self._log()

    def _receive(self) -> Received:
        """Wait for the step in flight and note its tokens; none if there is no such step."""
        if self._in_flight is None:
            return []
        plan, launched = self._in_flight
        try:
            result = launched.result()
        except DeviceLostError:
            raise
        except Exception as error:
            raise _ResultLostError from error
        self._in_flight = None
        return self.scheduler.receive(plan, result)

    def _fail_everything(self, error: BaseException) -> None:
        """A step was lost after what it computes was published, or before although it was
        launched: nothing that is cached or runs can be trusted any more."""
        logger.error(
            "A step was lost: everything that runs fails, and the prefix cache is emptied.",
            exc_info=error,
        )
        self._in_flight = None
        self.reset()
        self.scheduler.fail(self.scheduler.started(), error)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or self._in_flight is not None

    def dummy_forward(self) -> None:
        """An idle step: run the model for nobody. Cache, counters, requests and a step in flight
        stay."""
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
        arrived: float | None = None,
    ) -> None:
        """Queue a request. Raises InvalidRequestError, without effect, if it can't be served.

        cache_salt, adapter: only prompts with the same ones share anything. priority: a smaller
        number runs first; who waits long gets ahead all the same. cache_checkpoints: positions in
        the prompt at which its state is wanted later. message_ends: where the messages of a chat
        end, ascending, the system message's first; a hint for where to keep states. arrived: when
        it came, by `time.monotonic`, for the latencies that are measured (None: now).
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

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End a request, or one of its answers, for this reason; the last event comes with the
        next step. Unknown ids are ignored."""
        self.scheduler.abort(request_id, index, reason)

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

    @property
    def is_paused(self) -> bool:
        """Whether requests wait until `resume`."""
        return False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs and no step is in flight."""
        return self.scheduler.num_running == 0 and self._in_flight is None

    def pause(self, mode: str) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def update_weights(self, folder: str) -> None:
        raise NotImplementedError

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
