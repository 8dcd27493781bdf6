"""DynamicInferenceEngine: submit requests, call step until there is no work."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.changes import CacheChanges
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.engine.adapters import Adapters
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.incoming import Incoming
from megatron_hybrid.engine.integrity import check_integrity
from megatron_hybrid.engine.latency import Clock, Latencies, StepTimes
from megatron_hybrid.engine.scheduler import Received, Scheduler
from megatron_hybrid.engine.sleep import Sleeper
from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.engine.statistics import Statistics
from megatron_hybrid.engine.weights import EngineWeights
from megatron_hybrid.errors import DeviceLostError, InvalidRequestError
from megatron_hybrid.execution.lockstep import Lockstep
from megatron_hybrid.execution.plan import Launched, Runner, StepDemand, StepPlan, WeightsSource
from megatron_hybrid.pause_mode import PAUSE_MODES, PauseMode
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from megatron_hybrid.request_checks import validate_names
from megatron_hybrid.text.grammar import Grammars

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
        clock: Clock = time.monotonic,
        grammars: Grammars | None = None,
        lockstep: Lockstep | None = None,
        is_alone: bool = True,
        speculation: Speculation | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`grammars`: None for a model without a tokenizer, whose answers can't have one.
        `lockstep`: with the replicas that share experts with this one. `is_alone`: no other rank
        takes part in a step. `speculation`: chooses drafts; None: decodes have none. `adapters`:
        None for an engine that takes none."""
        self.context = context
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_seq_length = context.max_seq_length
        self.max_seq_length_flag = context.max_seq_length_flag
        self.eos_token_ids = eos_token_ids
        self.latencies = Latencies(context.geometry.max_requests, clock)
        self.statistics = Statistics(context.cache, self.latencies)
        self.scheduler = Scheduler(
            context,
            self.statistics,
            chunked_prefill=chunked_prefill,
            break_at_checkpoints=break_at_checkpoints,
            speculation=speculation,
        )
        self.weights = EngineWeights(runner, context, clock)
        self.sleeper = Sleeper(self)
        self.sleep, self.wake_up = self.sleeper.sleep, self.sleeper.wake_up
        self._log_interval = log_interval
        self._adapters = adapters or Adapters()
        self.incoming = Incoming(
            context,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            seed=seed,
            chunked_prefill=chunked_prefill,
            clock=clock,
            grammars=grammars,
            adapters=self._adapters,
        )
        self.lockstep = lockstep
        self._is_alone = is_alone
        self._in_flight: tuple[StepPlan, Launched] | None = None
        self._clock = clock
        self._started = clock()
        self._step_times = StepTimes()

    # --------------------------------------------------------------- the loop

    def step(self) -> list[RequestEvent]:
        """Run one step and return what is new: tokens and the ends of requests.

        With an asynchronous runner these are of the step before. In a lockstep group every replica
        calls it, with work or without, until none has any. Raises DeviceLostError when nothing can
        be computed any more, SleepError while the engine sleeps and has no events.
        """
        self.weights.check()
        self.sleeper.check()
        self.statistics.begin_step()
        try:
            self._step()
        except DeviceLostError:
            raise
        except _ResultLostError as lost:
            if not self._is_alone:
                raise
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
        launched = self._launch(plan)
        received = self._receive()  # of the step before, if it is in flight
        if launched is not None:
            scheduler.publish(plan)
            self._in_flight = plan, launched
            self.statistics.log(self._log_interval)
        scheduler.settle(received)
        if not self.runner.asynchronous:
            scheduler.settle(self._receive())

    def _launch(self, plan: StepPlan) -> Launched | None:
        """Begin a planned step. None: it computes nothing, or it failed; then its requests give
        back what they hold, and end once the tokens in flight have been handed out."""
        self._step_times.note(plan.step, self._clock())
        if plan.is_empty:
            self._join_others()
            self.context.transfers.wait(is_idle=self._in_flight is None)
            return None
        try:
            agreed = None
            if self.lockstep is not None:
                agreed = self.lockstep.agree(StepDemand.of(plan), has_work=True)
            launched = self.runner.launch(plan, agreed)
        except DeviceLostError:
            raise
        except Exception as error:
            if not self._is_alone:  # other ranks may wait in a collective that this one has left
                raise
            logger.exception("step %d failed", plan.step)
            if plan.catch_ups or plan.packs:  # into states that are cached already
                self.reset()
            self.scheduler.drop(plan, error)
            return None
        self.latencies.was_launched(plan)
        return launched

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
        received = self.scheduler.receive(plan, result)
        self.latencies.was_received(plan, received, result)
        return received

    def _fail_everything(self, error: BaseException) -> None:
        """A step was lost after what it computes was published, or before although it was
        launched: nothing that is cached or runs can be trusted any more."""
        words = "A step was lost: everything that runs fails, and the prefix cache is emptied."
        logger.error(words, exc_info=error)
        self._in_flight = None
        self.reset()
        self.scheduler.fail(self.scheduler.started(), error)

    @property
    def num_waiting(self) -> int:
        """Answers that have not begun."""
        return self.scheduler.num_waiting

    def has_work(self) -> bool:
        """Whether `step` would do anything, for this replica or for another one in lockstep."""
        return self._has_own_work() or (self.lockstep is not None and self.lockstep.has_work)

    def _has_own_work(self) -> bool:
        lost = self.weights.are_lost  # `step` says so
        return self.scheduler.has_work or self._in_flight is not None or lost

    def dummy_forward(self) -> None:
        """An idle step: run the model for nobody. Cache, counters, requests and a step in flight
        stay. In a lockstep group, take part in the others' step, if they compute one."""
        self.sleeper.check()
        if self.lockstep is None:
            self.runner.dummy_forward()
        else:
            self._join_others()

    def use_idle_time(self) -> bool:
        """There is no work, on any rank and replica, which all call this: do one of the things that
        were left for later. Whether there was one."""
        if self.scheduler.is_held:
            return False
        wrote = not self._in_flight and self.context.transfers.use_idle_time(self.runner)
        return self.runner.capture_next() or wrote

    def _join_others(self) -> None:
        """Nothing is launched here in this turn; in a lockstep group others may need us."""
        if self.lockstep is not None:
            agreed = self.lockstep.agree(StepDemand(), has_work=self._has_own_work())
            if agreed.tokens:
                self.runner.dummy_forward(agreed)

    # --------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        adapter: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        message_ends: Sequence[int] = (),
        arrived: float | None = None,
        prefilled_by: str = "",
    ) -> None:
        """Queue a request. Raises InvalidRequestError, without effect, if it can't be served.

        cache_salt, adapter: only prompts with the same ones share anything. adapter: one of
        `adapters`; "" for none. priority: a smaller number runs first; who waits long gets ahead
        all the same. cache_checkpoints: positions in the prompt at which its state is wanted later.
        message_ends: of a chat, ascending, the system message's first; hints for states. arrived:
        when, by `time.monotonic` (None: now). prefilled_by: one of --disaggregation-peers, which
        has computed the prompt.
        """
        validate_names(request_id=request_id, cache_salt=cache_salt, adapter=adapter)
        if self.scheduler.knows(request_id):
            raise InvalidRequestError("request_id", f"request_id {request_id!r} is in use.")
        requests = self.incoming.requests(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            adapter=adapter,
            priority=priority,
            cache_checkpoints=cache_checkpoints,
            message_ends=message_ends,
            arrived=arrived,
            prefilled_by=prefilled_by,
        )
        self.scheduler.submit(requests)

    def begin_grammar(self, params: SamplingParams) -> bool:
        """Compile the grammar of a request that is to come, or read the tokenizer, if it needs
        that, beside the steps; whether `add_request` need not wait for it any more."""
        return self.incoming.begin_grammar(params)

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
        """Counters since the start and gauges of now; see docs/prefix_cache.md and, for the times,
        docs/server_metrics.md."""
        kv, states = self.context.cache.last_uses()
        now = self._clock()
        return {
            "requests_running": self.scheduler.num_running,
            "requests_waiting": self.scheduler.num_waiting,
            "paused": self.is_paused,
            **self.weights.stats(),
            **self.incoming.adapter_stats(),
            **self.sleeper.stats(),
            "started": self._started,
            **self.statistics.as_dict(),
            "kv_cached_by_age": self._step_times.count_by_age(kv, now),
            "state_cached_by_age": self._step_times.count_by_age(states, now),
            "latency": self.latencies.as_dict(),
            "iteration_tokens": self.latencies.iteration_tokens.as_dict(),
        }

    @property
    def epoch(self) -> int:
        """How often the weights were updated."""
        return self.context.cache.epoch

    def reset(self, preserve_prefix_cache: bool = False) -> None:
        """Empty the prefix cache (unless preserved). Running requests go on; those that began
        before their cache was emptied publish nothing."""
        if not preserve_prefix_cache:
            self.context.cache.reset()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, as `reset`."""
        self.reset()

    @property
    def sleeping(self) -> list[str]:
        """What memory is given back, by the tags of `sleep`."""
        return self.sleeper.sleeping

    @property
    def cache_geometry(self) -> CacheGeometry:
        """The sizes of blocks, states and their pools."""
        return self.context.geometry

    def cache_changes(self) -> CacheChanges:
        """What changes in the prefix cache from now on. Before the first request, and once.

        What is stored during a `step` may be reused by any request that comes after that call: its
        computation has been launched before theirs can be. If it fails, the cache is cleared.
        """
        return self.context.cache.take_down_changes()

    # ------------------------------------------------------ pause and weights

    @property
    def is_paused(self) -> bool:
        """Whether requests wait until `resume`, or until the engine is awake."""
        return self.scheduler.pause_mode is not None or self.scheduler.is_held

    @property
    def pause_mode(self) -> str | None:
        """Of the pause that holds; None: there is none, though the engine may sleep."""
        return self.scheduler.pause_mode

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is computed until something is asked of the engine: no step is in
        flight, and every event was handed out. A pause has come to rest then."""
        return not self._has_own_work()

    def pause(self, mode: str) -> None:
        """Begin no more requests; those that come wait. Answers that have begun: "finish" lets
        them go on to their end, "abort" ends them, "keep" stops them where they stand until
        `resume`. Call `step` while there is work, then `is_quiet`. Paused already: the mode
        changes. Raises InvalidRequestError for another mode."""
        if mode not in PAUSE_MODES:
            known = ", ".join(PAUSE_MODES)
            raise InvalidRequestError("mode", f"mode is {mode!r}; it can be {known}.")
        self.scheduler.pause(PauseMode(mode))

    def resume(self) -> None:
        """Go on after `pause`, with those who waited in their order."""
        if not self.weights.are_lost:
            self.weights.check()
        self.weights.rename()
        self.scheduler.resume()

    def update_weights(self, source: WeightsSource, version: str | None = None) -> None:
        """Overwrite the model's weights between two steps, and empty the cache.

        `source`: a Hugging Face folder of the same model; or tensors by Hugging Face's names, whole
        ones on every rank, of which some may be left out. `version`: what answers call the weights
        then. What is in flight is received first; answers that have begun (pause before, to let
        them end) go on with the new weights from the KV and states that they have, and publish
        nothing. Raises WeightsError, and changes nothing, for weights that do not fit;
        WeightsLostError if only a part was copied, and in every step.
        """
        self.come_to_rest()
        self.weights.update(source, version)
        if not self.is_paused:
            self.weights.rename()

    def come_to_rest(self) -> None:
        """Receive what is in flight, and write every state that is behind its tokens."""
        try:
            self.scheduler.settle(self._receive())
        except _ResultLostError as lost:
            self._fail_everything(lost.__cause__ or lost)
        if catch_ups := self.scheduler.decodes.write_states():
            self.runner.catch_up(catch_ups)

    # --------------------------------------------------------------- adapters

    @property
    def adapters(self) -> list[str]:
        """Names that requests may give."""
        return self._adapters.names

    @property
    def adapter_folders(self) -> dict[str, str]:
        """By name, the folder that each was read from; "": it came as tensors."""
        return self._adapters.folders

    @property
    def adapter_keys(self) -> dict[str, str]:
        """By name, what stands for each in keys of cached prefixes: it changes with its weights."""
        return self._adapters.keys

    def load_adapter(
        self, name: str, source: WeightsSource, config: Mapping[str, Any] | None = None
    ) -> None:
        """A PEFT folder; or tensors by PEFT's names, whole ones on every rank, and what
        adapter_config.json would say. One of this name serves those who began with it to their end.
        Raises WeightsError for one that does not fit; InvalidRequestError where --max-loras are in
        use. Neither changes anything."""
        self._adapters.load(name, source, config, self.runner, self.incoming.adapter_slots)

    def unload_adapter(self, name: str) -> None:
        """No further request can have it; those that it serves go on to their end, and its room is
        free then. Raises InvalidRequestError for an unknown name."""
        self._adapters.unload(name)

    def check_integrity(self) -> None:
        """Assert every invariant of the cache; call between steps."""
        scheduler = self.scheduler
        check_integrity(self.context, scheduler.twins.pins, scheduler.decodes.reserved_slots)
