"""An engine without a model: it answers with the prompt again. Same methods as the real one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.tier import NO_TIER
from megatron_hybrid.engine.fingerprint import Fingerprint
from megatron_hybrid.engine.latency import AGES, OLDER, Latencies
from megatron_hybrid.errors import InvalidRequestError, SleepError, WeightsError
from megatron_hybrid.request import (
    CONTEXT_FLAG,
    FinishReason,
    RequestEvent,
    SamplingParams,
    TokenLogprob,
)
from megatron_hybrid.request_checks import (
    validate_cache_checkpoints,
    validate_priority,
    validate_prompt,
    validate_routed_experts,
)
from megatron_hybrid.server.http.protocol.answers import COUNTERS, COUNTERS_BY_NAME

if TYPE_CHECKING:  # so that no method of ours drifts from the real one; which takes long to import
    from megatron_hybrid.engine.engine import DynamicInferenceEngine
    from megatron_hybrid.execution.plan import WeightsSource
else:
    DynamicInferenceEngine = object

BLOCK_SIZE = 4
QUEUE_SECONDS = 0.0625  # that each request says it has waited
PREFILL_SECONDS = 0.03125  # from there to its first token


class Added(NamedTuple):
    """A request as it came in."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    cache_salt: str
    priority: int
    cache_checkpoints: tuple[int, ...]
    message_ends: tuple[int, ...]
    prefilled_by: str
    adapter: str = ""


@dataclass
class _Running:
    """One choice of a request."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    cached_tokens: int
    arrived: float
    last_token: float | None = None
    generated: list[int] = field(default_factory=list)
    aborted: FinishReason | None = None
    begun: bool = False

    def is_at_its_last_token(self) -> bool:
        return self.aborted is None and len(self.generated) + 1 >= self.max_tokens


class FakeTransfers:
    """Of prompts that another server computes: nothing is read of them unless a test says so.

    `begun`: by name, the peer and its request."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[str, str]] = {}
        self.are_read_ahead = True
        self.stopped: list[str] = []

    def read_ahead(
        self, name: str, tokens: npt.NDArray[np.int32], cache_salt: str, peer: str, request: str
    ) -> None:
        self.begun[name] = peer, request

    def is_read_ahead(self, name: str) -> bool:
        return self.are_read_ahead or name in self.stopped

    def stop_reading_ahead(self, name: str) -> None:
        self.stopped.append(name)


class FakeTrainer:
    """Like WeightTransfers of an engine whose trainer does not come. Without torch."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def open(self, wanted: Any) -> None:
        self.log.append(wanted)
        if wanted.host != "trainer":
            raise WeightsError(f"The trainer at {wanted.host}:{wanted.port} did not come.")

    def close(self, name: str) -> bool:
        self.log.append(f"close {name}")
        return name == "known"

    def all_of(self, wanted: Any) -> dict[str, Any]:
        self.log.append(wanted)
        return {}

    def sources(self, wanted: Any) -> Iterator[Any]:
        self.log.append(wanted)
        if getattr(wanted, "group", "") != "known":
            raise WeightsError("Nothing is sent.")
        yield "sent"


class FakeWeights:
    """Like EngineWeights, without any."""

    is_open = False

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.fingerprint = Fingerprint({"model": {"weights": "first"}})
        self.version = "0"
        self.transfers = FakeTrainer()

    def begin(self) -> None:
        self.is_open = True

    def update_from(self, sources: Iterable[Any], version: str | None = None) -> None:
        for source in sources:
            self._engine.log.append(f"update {Path(source).name}")
        if not self.is_open:
            self.finish(version)

    def call(self, version: str) -> None:
        self.version = version

    def finish(self, version: str | None = None) -> None:
        self.is_open = False
        self._engine.change_weights("sent", version)


class FakeEngine(DynamicInferenceEngine):
    """Greedy: repeats the prompt, choice i from its token i on. Sampled: random ids from the seed.

    One token a step for each choice; the choices after the first skip the whole prompt.

    `fail_on`: a prompt that holds this id makes `step` raise (once; each time with `fails_again`).
    `held_by`: while there is such a file, no choice gets its last token.
    """

    max_seq_length = 128
    max_seq_length_flag = CONTEXT_FLAG
    lockstep = None
    num_waiting = 0  # a test may say that some are
    grammars_are_ready = True
    refuses_to_sleep = False

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        step_seconds: float = 0.0,
        fail_on: int | None = None,
        fails_again: bool = False,
        held_by: Path | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.log: list[str] = []
        self.step_seconds = step_seconds
        self._fail_on = fail_on
        self.fails_again = fails_again
        self._held_by = held_by
        self.added: list[Added] = []
        self._running: dict[tuple[str, int], _Running] = {}
        self._cached: set[tuple[str, tuple[int, ...]]] = set()
        self._generated = 0
        self._prompt_tokens = self._skipped = 0
        self._finished: dict[str, int] = {}
        self._started = time.monotonic()
        self._latencies = Latencies(max_requests=0)  # of which it needs the histograms alone
        self._broken = False
        self._pause: str | None = None
        self._epoch = 0
        self._asleep: set[str] = set()
        self._adapter_folders: dict[str, str] = {}
        self.weights: Any = FakeWeights(self)
        self.sleeper: Any = SimpleNamespace(check=lambda: None)
        self.transfers = FakeTransfers()
        self.context: Any = SimpleNamespace(transfers=self.transfers)

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
        params.validate()
        validate_routed_experts(params, are_kept=False)
        validate_priority(priority)
        validate_prompt(prompt_token_ids, self.vocab_size, self.max_seq_length)
        validate_cache_checkpoints(cache_checkpoints, len(prompt_token_ids))
        if any(known == request_id for known, _ in self._running):
            raise InvalidRequestError("request_id", f"request_id {request_id!r} is in use.")
        if adapter and adapter not in self._adapter_folders:
            raise InvalidRequestError("adapter", f"Adapter {adapter!r} is not loaded.", 404)
        prompt = list(prompt_token_ids)
        room = self.max_seq_length - len(prompt)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        assert max_tokens <= room, "the server lets nothing through that cannot fit"
        assert params.min_tokens <= room
        prefixes = [
            (cache_salt, tuple(prompt[:end])) for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
        ]
        hits = sum(prefix in self._cached for prefix in prefixes)
        self._cached.update(prefixes)
        for index in range(params.n):
            cached = hits * BLOCK_SIZE if index == 0 else len(prompt)
            since = time.monotonic() if arrived is None else arrived
            self._running[request_id, index] = _Running(prompt, params, max_tokens, cached, since)
            self._prompt_tokens += len(prompt)
            self._skipped += cached
            self._observe("request_queue_time_seconds", since)
        self.log.append(f"add {request_id}")
        self.added.append(
            Added(
                request_id,
                prompt,
                params,
                cache_salt,
                priority,
                tuple(cache_checkpoints),
                tuple(message_ends),
                prefilled_by,
                adapter,
            )
        )

    def begin_grammar(self, params: SamplingParams) -> bool:
        return params.grammar is None or self.grammars_are_ready

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        self.log.append(f"abort {request_id}" if index is None else f"abort {request_id} {index}")
        for key, one in self._running.items():
            if key[0] == request_id and index in (None, key[1]):
                one.aborted = reason

    def has_work(self) -> bool:
        return bool(self._active())

    def use_idle_time(self) -> bool:
        return False

    def _active(self) -> dict[tuple[str, int], _Running]:
        """Those that a step advances."""
        if self._pause is None and not self._asleep:
            return self._running
        goes_on = self._pause != "keep" and not self._asleep
        return {
            key: one
            for key, one in self._running.items()
            if one.aborted is not None or (goes_on and one.begun)
        }

    def step(self) -> list[RequestEvent]:
        time.sleep(self.step_seconds)
        active = self._active()
        for one in active.values():
            one.begun = True
        failing = [one for one in active.values() if self._fail_on in one.prompt]
        if self._broken or any(one.aborted is None for one in failing):
            self._broken = self.fails_again
            raise RuntimeError("the fake engine was asked to fail")
        if self._held_by is not None and self._held_by.exists():
            active = {key: one for key, one in active.items() if not one.is_at_its_last_token()}
        events = [self._advance(*key, one) for key, one in active.items()]
        for event in events:
            if event.finish_reason is not None:
                one = self._running.pop((event.request_id, event.index))
                reason = event.finish_reason.value
                self._finished[reason] = self._finished.get(reason, 0) + 1
                self._observe("e2e_request_latency_seconds", one.arrived)
        return events

    def stats(self) -> dict[str, Any]:
        return {
            **dict.fromkeys(COUNTERS, 0),
            "prompt_tokens": self._prompt_tokens,
            "computed_tokens": self._prompt_tokens - self._skipped,
            "skipped_tokens": self._skipped,
            "matched_tokens": self._skipped,
            "generated_tokens": self._generated,
            "requests_finished": self._finished,
            "paused": self.is_paused,
            "epoch": self.epoch,
            "weight_version": self.weights.version,
            "weight_updates": {"done": self.epoch, "refused": 0, "lost": 0},
            "weight_update_seconds": self._latencies.iteration_tokens.as_dict(),
            "lora_slots": 8,
            "lora_slots_used": len(self._adapter_folders),
            "lora_adapters": len(self._adapter_folders),
            "lora_requests": dict.fromkeys(self._adapter_folders, 0),
            "lora_requests_running": {},
            "lora_requests_waiting": {},
            "sleeping": {tag: tag in self._asleep for tag in ("weights", "kv_cache")},
            "sleeping_bytes": 7 * len(self._asleep),
            "started": self._started,
            "latency": self._latencies.as_dict(),
            "iteration_tokens": self._latencies.iteration_tokens.as_dict(),
            "lost_tokens": {"grid": 3},
            "checkpoints_published": {"divergence": 1},
            "checkpoints_read": {},
            "accepted_by_position": {},
            "requests_running": len(self._running),
            "requests_waiting": 0,
            **NO_TIER.figures(),
            "weight_bytes": {"bfloat16": 1000},
            "start_seconds": {"imports": 1.5},
            "kv_blocks": 4,
            "kv_free": 1,
            "kv_used": 1,
            "kv_cached": 3,  # one of them in use
            "kv_evictable": 2,
            "kv_cached_by_age": _by_age(2),
            "state_slots": 0,
            "state_free": 0,
            "state_live": 0,
            "state_used": 0,
            "state_cached": 0,
            "state_evictable": 0,
            "window_blocks": 0,
            "window_free": 0,
            "window_used": 0,
            "window_evictable": 0,
            "state_cached_by_age": _by_age(0),
            "last_step": {
                "step": 0,
                **dict.fromkeys(COUNTERS, 0),
                **dict.fromkeys(COUNTERS_BY_NAME, {}),
            },
            "log": self.log[-1000:],
        }

    def reset_prefix_cache(self) -> None:
        self._cached.clear()

    @property
    def is_paused(self) -> bool:
        return self._pause is not None or bool(self._asleep)

    @property
    def pause_mode(self) -> str | None:
        return self._pause

    @property
    def is_quiet(self) -> bool:
        return not self.has_work()

    def pause(self, mode: str) -> None:
        self.log.append(f"pause {mode}")
        self._pause = mode
        if mode == "abort":
            for one in self._running.values():
                one.aborted = FinishReason.ABORT if one.begun else one.aborted

    def resume(self) -> None:
        self.log.append("resume")
        self._pause = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def update_weights(self, source: WeightsSource, version: str | None = None) -> None:
        """A folder called "wrong" does not fit; one called "half" is copied only in part."""
        source = Path(source).name
        self.log.append(f"update {source}")
        if source == "wrong":
            raise WeightsError("Weight 'x' is missing in wrong.")
        if source == "half":
            raise RuntimeError("The new weights were copied only in part.")
        self.change_weights(str(source), version)

    def change_weights(self, name: str, version: str | None) -> None:
        self._cached.clear()
        self._epoch += 1
        self.weights.version = str(self._epoch) if version is None else version
        self.weights.fingerprint = Fingerprint({"model": {"weights": name}})

    def sleep(self, tags: Sequence[str] = (), keep_weights: bool = True) -> None:
        self.log.append(f"sleep {' '.join(tags)} {keep_weights}")
        if self.refuses_to_sleep:
            raise SleepError("This engine can't give memory back.")
        self._asleep |= set(tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.log.append(f"wake {' '.join(tags or ())}")
        self._asleep -= set(tags or ())

    @property
    def sleeping(self) -> list[str]:
        return sorted(self._asleep)

    @property
    def adapters(self) -> list[str]:
        return list(self._adapter_folders)

    @property
    def adapter_folders(self) -> dict[str, str]:
        return dict(self._adapter_folders)

    @property
    def adapter_keys(self) -> dict[str, str]:
        return {name: f"{name}@{folder}" for name, folder in self._adapter_folders.items()}

    def load_adapter(self, name: str, source: Any, config: Mapping[str, Any] | None = None) -> None:
        folder = Path(source).name if isinstance(source, str) else ""
        self.log.append(f"load {name} {folder}")
        if folder == "wrong":
            raise WeightsError("Adapter wrong has no lora_A.")
        self._adapter_folders[name] = folder

    def unload_adapter(self, name: str) -> None:
        if name not in self._adapter_folders:
            raise InvalidRequestError("adapter", f"Adapter {name!r} is not loaded.", 404)
        self.log.append(f"unload {name}")
        del self._adapter_folders[name]

    def come_to_rest(self) -> None:
        pass

    def _advance(self, request_id: str, index: int, one: _Running) -> RequestEvent:
        event = RequestEvent(
            request_id,
            index,
            prompt_tokens=len(one.prompt),
            cached_tokens=one.cached_tokens,
            weight_version=self.weights.version,
        )
        if one.aborted is not None:
            event.finish_reason = one.aborted
            event.counters = {"generated_tokens": len(one.generated)}
            return event
        position = len(one.generated)
        if one.params.greedy:
            token = one.prompt[(index + position) % len(one.prompt)]
        else:
            stream = random.Random(f"{one.params.seed} {index} {position}")
            token = stream.randrange(self.vocab_size)
        if one.max_tokens == 0:
            event.finish_reason, event.counters = FinishReason.LENGTH, {"generated_tokens": 0}
            event.queue_seconds, event.prefill_seconds = QUEUE_SECONDS, PREFILL_SECONDS
            event.prompt_logprobs = self._of_prompt(one)
            return event
        one.generated.append(token)
        self._generated += 1
        if one.last_token is None:
            self._observe("time_to_first_token_seconds", one.arrived)
            self._observe("request_prefill_time_seconds", one.arrived)
        else:
            self._observe("inter_token_latency_seconds", one.last_token)
        one.last_token = time.monotonic()
        event.token_ids = [token]
        if position == 0:
            event.queue_seconds, event.prefill_seconds = QUEUE_SECONDS, PREFILL_SECONDS
        if one.params.logprobs is not None:
            top = tuple((token + i, -float(i) - 0.5) for i in range(one.params.logprobs))
            event.logprobs = [TokenLogprob(token, -0.5, top) if top else -0.5]
        if index == 0 and position == 0:
            event.prompt_logprobs = self._of_prompt(one)
        stops = one.params.stop_token_ids
        if not one.params.ignore_eos:
            stops += self.eos_token_ids
        if token in stops:
            event.finish_reason, event.stop_token_id = FinishReason.STOP, token
        elif len(one.generated) == one.max_tokens:
            event.finish_reason = FinishReason.LENGTH
        if event.finish_reason is not None:
            event.counters = {"generated_tokens": len(one.generated)}
            event.queue_seconds = QUEUE_SECONDS
        return event

    @staticmethod
    def _of_prompt(one: _Running) -> list[TokenLogprob | None] | None:
        count, start = one.params.prompt_logprobs, one.params.prompt_logprobs_start
        if count is None:
            return None
        top = [tuple((t + i, -1.0 - i) for i in range(count)) for t in one.prompt]
        found = [TokenLogprob(t, -1.0, top[i]) for i, t in enumerate(one.prompt)]
        return [None, *found[1:]][start:]

    def _observe(self, name: str, since: float) -> None:
        self._latencies.histograms[name].observe(time.monotonic() - since)


def _by_age(newest: int) -> list[list[Any]]:
    return [[AGES[0][1], newest], *([label, 0] for _, label in AGES[1:]), [OLDER, 0]]
