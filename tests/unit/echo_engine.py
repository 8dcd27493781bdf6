"""An engine without a model for the benchmark's driver."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams


class EchoEngine:
    """Gives every request one token a step: its prompt's length. All skip one token."""

    def __init__(self, finish: FinishReason = FinishReason.LENGTH, missing: int = 0) -> None:
        """`missing`: so many tokens fewer than were asked for."""
        self.prompts: list[list[int]] = []
        self._running: dict[str, list[int]] = {}  # the token, and how many are to come
        self._finish = finish
        self._missing = missing

    def add_request(
        self, request_id: str, prompt_token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> None:
        assert params.greedy and params.ignore_eos and params.max_tokens is not None
        self.prompts.append(prompt_token_ids.tolist())
        self._running[request_id] = [len(prompt_token_ids), params.max_tokens - self._missing]

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestEvent]:
        events = []
        for request_id, state in list(self._running.items()):
            state[1] -= 1
            event = RequestEvent(request_id, token_ids=[state[0]], cached_tokens=1)
            if state[1] == 0:
                event.finish_reason = self._finish
                del self._running[request_id]
            events.append(event)
        return events
