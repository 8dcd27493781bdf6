"""/generate: answers in SGLang's shape."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_hybrid.request import FinishReason, TokenLogprob
from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.logprobs import finite, without_hurry
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Chunk
from megatron_hybrid.server.http.tokens.answers import TokenAnswers, event
from megatron_hybrid.server.http.tokens.generate_parsing import PreparedGenerate

ABORTED = "Aborted"  # as SGLang says
Entry = tuple[float | None, int, str | None]  # log-probability, token id, its text


@dataclass(slots=True)
class _SoFar:
    """What a stream has of one answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    tops: list[list[Entry]] = field(default_factory=list)


class GenerateAnswers(TokenAnswers):
    """Of one request. As events: each has all that there is of its answer so far, as SGLang's have
    unless it is started otherwise."""

    def __init__(
        self, serving: Serving, prepared: PreparedGenerate, generation: Generation
    ) -> None:
        """Begins; raises what `Generation.start` raises."""
        self._form = prepared.form
        self._so_far: dict[int, _SoFar] = {}
        self._texts: dict[int, str] = {}  # of token ids
        super().__init__(serving, prepared.prompts, generation, with_text=True)

    def whole(self, answers: list[Delta]) -> Any:
        made = [self._answer(answer) for answer in answers]
        return made if self._form.is_list else made[0]

    def events(self, delta: Delta) -> bytes:
        index = {"index": delta.index} if self._form.is_list else {}
        return event({**self._answer(delta), **index})

    def _answer(self, delta: Delta) -> Chunk:
        """With this delta, and what came before it."""
        so_far = self._so_far.setdefault(delta.index, _SoFar())
        so_far.text += delta.text
        so_far.token_ids += delta.token_ids
        prompt = self._prompts[delta.index // self._n]
        generation, choice = self._generation, self._choices[delta.index]
        meta: Chunk = {
            "id": prompt.generation.called or f"{generation.request_id}-{delta.index // self._n}",
            "finish_reason": self._reason(delta, so_far.token_ids),
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": choice.completion_tokens,
            "weight_version": choice.versions[-1][0]
            if choice.versions
            else generation.weight_version,
        }
        if self._serving.options.report_cached_tokens:
            meta["cached_tokens"] = choice.cached_tokens
        if prompt.generation.params.logprobs is not None:
            meta |= self._logprobs(delta, so_far)
        if delta.finish_reason is not None:
            meta["e2e_latency"] = generation.seconds(delta.index)
            meta["weight_versions"] = self._weight_versions(delta.index)
        if (experts := delta.routed_experts) is not None:
            meta["routed_experts"] = b64encode(experts.array().astype(np.int32).tobytes()).decode()
            meta["routed_experts_start_len"] = experts.start
        answer: Chunk = {"text": so_far.text, "output_ids": so_far.token_ids, "meta_info": meta}
        if self._form.with_prompt:
            answer["prompt_token_ids"] = prompt.token_ids.tolist()
        return answer

    def _reason(self, delta: Delta, token_ids: Sequence[int]) -> Chunk | None:
        """Why it ended; None while it has not."""
        match delta.finish_reason:
            case None:
                return None
            case FinishReason.LENGTH.value:
                return {"type": "length", "length": len(token_ids)}
            case FinishReason.STOP.value:
                matched = self._choices[delta.index].stop_reason
                # A grammar that is complete ends with the token that completes it.
                last = token_ids[-1] if token_ids else None
                return {"type": "stop", "matched": last if matched is None else matched}
        return {"type": "abort", "message": ABORTED, "status_code": None, "err_type": None}

    def _logprobs(self, delta: Delta, so_far: _SoFar) -> Chunk:
        params = self._prompts[delta.index // self._n].generation.params
        so_far.logprobs += map(self._entry, without_hurry(delta.logprobs))
        of_prompt = self._of_prompt(delta.index // self._n)
        said: Chunk = {
            "input_token_logprobs": [self._entry(one) for one in without_hurry(of_prompt)],
            "output_token_logprobs": so_far.logprobs,
            "output_token_logprobs_length": len(so_far.logprobs),
        }
        if of_prompt:  # nothing says how likely the first one is
            said["input_token_logprobs"][0] = (None, *said["input_token_logprobs"][0][1:])
        if params.logprobs:
            so_far.tops += map(self._top, without_hurry(delta.logprobs))
            first = [None] if of_prompt else []
            said["input_top_logprobs"] = [*first, *map(self._top, without_hurry(of_prompt[1:]))]
            said["output_top_logprobs"] = so_far.tops
        return said

    def _of_prompt(self, number: int) -> Sequence[TokenLogprob]:
        """What is known of it, from where it was asked for; the first one's may be wrong."""
        asked = self._prompts[number]
        start = asked.generation.params.prompt_logprobs_start
        known = self._generation.prompt_logprobs.get(number, [])
        return [
            TokenLogprob(asked.token_ids[start + place], 0.0) if one is None else one
            for place, one in enumerate(known)
        ]

    def _entry(self, one: TokenLogprob) -> Entry:
        return finite(one.logprob), one.token_id, self._text(one.token_id)

    def _top(self, one: TokenLogprob) -> list[Entry]:
        return [(finite(logprob), token, self._text(token)) for token, logprob in one.top]

    def _text(self, token_id: int) -> str | None:
        if not self._form.with_text:
            return None
        if token_id not in self._texts:
            decode = self._serving.tokenizer.decode
            self._texts[token_id] = decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]
