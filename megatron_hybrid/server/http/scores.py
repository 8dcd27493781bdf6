"""/score_tokens: how likely given answers are; nothing is generated."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.errors import RequestError
from megatron_hybrid.scoring import known
from megatron_hybrid.server.http.choice import Choice, Delta
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.prepared import PreparedScores
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Answers, Chunk


class NotScored(RequestError):
    """An answer was ended, by /abort or a pause, before it was computed."""

    status, code, field = 503, "aborted", "answers"


class Scores(Answers):
    """Of one request's answers."""

    def __init__(self, serving: Serving, scores: PreparedScores, generation: Generation) -> None:
        """Begins; raises what `Generation.start` raises."""
        wanted, prompts = scores.generation, scores.prompts
        super().__init__(serving, generation, wanted, number=len(prompts))
        self._prompts, self._begin = prompts, scores.prompt_tokens
        self._with_top = scores.with_top
        generation.start(prompts, lambda index: Choice(index, serving.tokenizer, wanted))

    def whole(self, answers: list[Delta]) -> Chunk:
        """Raises NotScored."""
        generation = self._generation
        return {
            "id": generation.request_id,
            "object": "score",
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": generation.fingerprint,
            "scores": [self._score(answer.index) for answer in answers],
            "usage": generation.usage(),
        }

    def _score(self, index: int) -> Chunk:
        token_ids = self._prompts[index][self._begin :].tolist()
        entries = known(self._generation.prompt_logprobs.get(index), len(token_ids))
        if entries is None:
            raise NotScored(f"answers[{index}] was aborted before it was scored.")
        logprobs = [entry.logprob for entry in entries]
        score: dict[str, Any] = {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "total_logprob": sum(logprobs),
        }
        if self._with_top:
            score["top_logprobs"] = [
                [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
                for entry in entries
            ]
        return score

    def events(self, delta: Delta) -> bytes:
        raise NotImplementedError("Scores come in one piece.")

    def failed(self, error: Chunk) -> bytes:
        raise NotImplementedError("Scores come in one piece.")
