"""Requests as they come: checked, and made into what the scheduler takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.checkpoint_placement import CheckpointHints
from megatron_hybrid.engine.adapters import Adapters
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.latency import Clock
from megatron_hybrid.engine.tracked_request import TrackedRequest, stop_ids_of
from megatron_hybrid.execution.random_streams import stream_seed
from megatron_hybrid.request import RequestStatus, SamplingParams
from megatron_hybrid.request_checks import (
    validate_arrival,
    validate_cache_checkpoints,
    validate_in_one_step,
    validate_params,
    validate_priority,
    validate_prompt,
    validate_routed_experts,
    validate_whole_numbers,
)
from megatron_hybrid.text.grammar import Grammars, matcher_of
from megatron_hybrid.text.thought_limit import limit_of

_MANY = 1000  # requests among which those that have ended are looked for


class Incoming:
    """Arguments as of DynamicInferenceEngine."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        chunked_prefill: bool,
        clock: Clock,
        grammars: Grammars | None,
        adapters: Adapters,
    ) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._context = context
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._chunked_prefill = chunked_prefill
        self._clock = clock
        self._adapters = adapters
        self._submitted = 0
        self._many = _MANY
        self._adapted: list[TrackedRequest] = []  # those with adapters, and some that have ended

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        cache_salt: str,
        adapter: str,
        priority: int,
        cache_checkpoints: Sequence[int],
        message_ends: Sequence[int],
        arrived: float | None,
        prefilled_by: str,
    ) -> list[TrackedRequest]:
        """One for each of the `params.n` answers; see DynamicInferenceEngine.add_request. Names are
        checked already. Raises InvalidRequestError, without effect, if it can't be served."""
        context = self._context
        validate_params(params, self.vocab_size)
        limit, flag = context.max_seq_length, context.max_seq_length_flag
        prompt = validate_prompt(prompt_token_ids, self.vocab_size, limit, flag=flag)
        validate_priority(priority)
        validate_cache_checkpoints(cache_checkpoints, len(prompt_token_ids))
        validate_whole_numbers("message_ends", message_ends)
        validate_arrival(arrived)
        own_adapter = self._adapters.find(adapter)
        length = len(prompt_token_ids)
        validate_routed_experts(params, are_kept=context.routed is not None)
        max_tokens = params.longest_answer(length, limit, flag)
        if not self._chunked_prefill:
            validate_in_one_step(length, context.max_tokens)
        context.transfers.check_peer(prefilled_by)
        stop_ids = stop_ids_of(params, self._eos_token_ids, self.vocab_size)
        hints = CheckpointHints(tuple(map(int, cache_checkpoints)), tuple(map(int, message_ends)))
        seed = self._next_seed(params)
        found = [
            TrackedRequest(
                request_id=request_id,
                prompt=np.asarray(prompt, dtype=np.int32),
                params=params,
                seed=stream_seed(seed, index) if index else seed,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                index=index,
                cache_salt=cache_salt,
                adapter=own_adapter,
                prefilled_by=prefilled_by,
                priority=int(priority),
                hints=hints,
                arrived=self._clock() if arrived is None else arrived,
                grammar=matcher_of(params, self.grammars),
                thoughts=limit_of(params, self.grammars),
            )
            for index in range(params.n)
        ]
        if own_adapter.slot:
            if len(self._adapted) >= self._many:
                self.adapter_slots()
                self._many = max(2 * len(self._adapted), _MANY)
            self._adapted += found
            self._adapters.asked[adapter] += params.n
        return found

    def adapter_slots(self) -> set[int]:
        """Of requests that have not ended."""
        self._adapted = [request for request in self._adapted if request.is_open]
        return {request.adapter.slot for request in self._adapted}

    def adapter_stats(self) -> dict[str, Any]:
        """See docs/server_metrics.md. By names that requests may have, or that some still have: no
        more than there are slots."""
        used = self.adapter_slots()
        by_status = {
            status: Counter(one.adapter.name for one in self._adapted if one.status is status)
            for status in (RequestStatus.RUNNING, RequestStatus.WAITING)
        }
        return {
            "lora_slots": self._adapters.slots,
            "lora_slots_used": len(self._adapters.taken(used)),
            "lora_adapters": len(self._adapters.names),
            "lora_requests": dict(self._adapters.asked),
            "lora_requests_running": dict(by_status[RequestStatus.RUNNING]),
            "lora_requests_waiting": dict(by_status[RequestStatus.WAITING]),
        }

    def begin_grammar(self, params: SamplingParams) -> bool:
        """See DynamicInferenceEngine.begin_grammar."""
        if not params.reads_answer or self.grammars is None:
            return True
        return self.grammars.begin(params.grammar)

    def _next_seed(self, params: SamplingParams) -> int:
        self._submitted += 1
        if params.seed is not None:
            return params.seed % 2**64
        return stream_seed(self._seed, self._submitted)
