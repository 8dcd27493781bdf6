"""TrackedRequest: one request inside the engine, from submission to its last event."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.hybrid_cache import Lease, PromptKeys
from megatron_hybrid.request import RequestStatus, SamplingParams, TokenLogprob

NO_ROW = -1


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """Waiting: neither lease nor row. Running: both. Prompts are computed up to `position`;
    after that the row table knows more."""

    request_id: str
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int  # unsigned, 64 bits
    max_tokens: int
    stop_ids: tuple[int, ...]
    cache_salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    output: list[int] = field(default_factory=list)
    position: int = 0  # prompt tokens computed or skipped
    cached_tokens: int = 0  # prompt tokens whose computation was skipped
    row: int = NO_ROW
    lease: Lease | None = None
    keys: PromptKeys | None = None
    keys_epoch: int = -1
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def total_tokens(self) -> int:
        """The most tokens that are ever computed for it: its last token is never fed."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def may_skip(self) -> bool:
        """Log-probabilities of the prompt need every one of its tokens computed."""
        return self.params.prompt_logprobs is None

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens [start, end) of prompt and answer."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        answer = np.asarray(self.output[max(0, start - length) : end - length], dtype=np.int32)
        return np.concatenate([self.prompt[start:], answer]) if start < length else answer
