"""Requests as Dynamo's front end hands them on: plain dicts, whose prompts are token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.generation_request import (
    default_max_tokens,
    of_prompt_alone,
    parse_completion,
)
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.after_thoughts import after_thoughts
from megatron_hybrid.text.reasoning import Opening, ReasoningFormat, opening_after
from megatron_hybrid.text.thinking import with_marks
from megatron_hybrid.text.tokenizer import Tokenizer

# What only a worker of another kind could do.
_ELSEWHERE = {
    "multi_modal_data": "pictures, sound and video are not supported",
    "encoder_result": "pictures, sound and video are not supported",
    "bootstrap_info": "a prompt is computed before a worker with --role decode goes on from it",
}
PEER = "peer"  # in `disaggregated_params`, which go through the front end as they are
# The front end does these itself, in the text.
_IN_TEXT = ("include_stop_str_in_output", "stop", "skip_special_tokens")
_STOP_IDS = ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model. reasoning: how it marks its thoughts, if it does. role: the
    worker's, as EngineConfig has it."""

    tokenizer: Tokenizer
    reasoning: ReasoningFormat | None
    options: ParseOptions
    role: str = "both"

    def read(
        self, request: Mapping[str, Any], name: str, *, arrived: float, probe: bool = False
    ) -> wire.AddRequest:
        """As the engine takes it, under this name. arrived: when it came, by `time.monotonic`.
        probe: it asks after the worker's health, and shares no prefix with anybody.

        Raises InvalidRequestError for whatever can't be done, by its field's name.
        """
        for field, reason in _ELSEWHERE.items():
            if request.get(field):
                raise InvalidRequestError(field, f"{field} can't be served: {reason}.")
        routing = request.get("routing") or {}
        if routing.get("lora_name"):
            raise InvalidRequestError("lora_name", "lora_name can't be served: adapters are not.")
        params = self._params(request)
        if params.n > 1:
            raise InvalidRequestError(
                "n",
                f"n is {params.n}: Dynamo's front end ends a request with the first answer that "
                "ends, so ask once for each.",
            )
        prefilled_by = self._prefilled_by(request)
        if self.role == "prefill":
            params = of_prompt_alone(params)
        ids = request["token_ids"]
        # The front end packs them as we do where DYN_TOKEN_IDS_AS_BYTES is set.
        prompt = wire.packed(ids) if isinstance(ids, list) else bytes(ids)
        return wire.AddRequest(
            name,
            prompt,
            params,
            message_ends=_message_ends(prompt, request.get("eos_token_ids") or ()),
            cache_salt="health check" if probe else _cache_salt(request, routing),
            # Dynamo's greater priorities run first, ours last.
            priority=-int(routing.get("priority") or 0),
            arrived=arrived,
            prefilled_by=prefilled_by,
        )

    def _prefilled_by(self, request: Mapping[str, Any]) -> str:
        """What the prefill worker has said that computed the prompt, if one has: its address."""
        result = request.get("prefill_result")
        if not result:
            return ""
        if self.role != "decode":
            raise InvalidRequestError(
                "prefill_result",
                "prefill_result can't be served: prompts are computed where answers are, unless "
                f"--role is decode; it is {self.role}.",
            )
        peer = (result.get("disaggregated_params") or {}).get(PEER) or ""
        if not isinstance(peer, str):
            raise InvalidRequestError(
                "prefill_result",
                f"prefill_result has the {PEER} {peer!r}; it must be the text of an address.",
            )
        return peer

    def _params(self, request: Mapping[str, Any]) -> SamplingParams:
        stops = _given(request.get("stop_conditions"))
        output = _given(request.get("output_options"))
        body = {**_given(request.get("sampling_options")), **stops}
        for field in (*_IN_TEXT, *_STOP_IDS):
            body.pop(field, None)
        guided = body.pop("guided_decoding", None)
        if guided:
            # The backend is whose grammar's library reads it; here there is one.
            body["structured_outputs"] = {
                field: value for field, value in _given(guided).items() if field != "backend"
            }
        budget = body.pop("max_thinking_tokens", None)
        body["stop_token_ids"] = list(
            dict.fromkeys(token for field in _STOP_IDS for token in stops.get(field) or ())
        )
        body["logprobs"] = output.get("logprobs")
        # The names are those of /v1/completions, so it reads them; the prompt comes as it is.
        wanted = parse_completion({**body, "prompt": [0]}, self.options).generation.params
        most = default_max_tokens(stops.get("max_tokens"), wanted.min_tokens, self.options)
        params = replace(
            wanted,
            max_tokens=most,
            prompt_logprobs=output.get("prompt_logprobs"),
            thinking_token_budget=budget,
        )
        params.validate()
        return self._with_thoughts(params, request["token_ids"])

    def _with_thoughts(self, params: SamplingParams, prompt: Any) -> SamplingParams:
        """What the engine has to know of thoughts: a grammar begins behind them, and a budget ends
        them."""
        if not params.reads_answer:
            return params
        begins = Opening.CONTENT
        if self.reasoning is not None:
            ids = prompt if isinstance(prompt, list) else memoryview(prompt).cast("i").tolist()
            begins = opening_after(self.reasoning, ids, self.tokenizer)
            if params.grammar is not None and begins is not Opening.CONTENT:
                held = after_thoughts(params.grammar, self.reasoning, begins, self.tokenizer)
                if held is None:
                    begins = Opening.CONTENT
                else:
                    params = replace(params, grammar=held)
        return with_marks(params, self.reasoning, begins, self.tokenizer)


def _given(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Without what is left open."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def _message_ends(prompt: bytes, ends: Sequence[int]) -> tuple[int, ...]:
    """Where messages of a chat end in its prompt, as far as tokens show it: most templates end
    each with what ends an answer."""
    found = np.isin(np.frombuffer(prompt, dtype="<i4"), ends)
    return tuple((np.flatnonzero(found) + 1).tolist())


def _cache_salt(request: Mapping[str, Any], routing: Mapping[str, Any]) -> str:
    """Of the request's own field, which the front end moves there, or of its nvext."""
    more = (request.get("extra_args") or {}).get("nvext") or {}
    salt = routing.get("cache_salt") or more.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise InvalidRequestError("cache_salt", f"cache_salt is {salt!r}; it must be text.")
    return salt
