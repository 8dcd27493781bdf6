"""What the body of /generate asks for, in our terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from msgspec import UNSET

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams, Unasked
from megatron_hybrid.server.http.protocol.generation_request import (
    MAX_ANSWERS,
    GenerationRequest,
    generation_of,
)
from megatron_hybrid.server.http.protocol.parsing import BY_DEFAULT, read
from megatron_hybrid.server.http.protocol.requests import AnswerRequest, StructuredOutputs
from megatron_hybrid.server.http.tokens.asked import AskedPrompt, PreparedTokens, Words
from megatron_hybrid.server.http.tokens.generate_body import GenerateRequest, GenerateSampling
from megatron_hybrid.server.options import ParseOptions

MAX_NEW_TOKENS = 128  # SGLang's default
GREEDY_BELOW = 1e-6  # temperatures, as SGLang has it
SAMPLING = "sampling_params"
# Our names of what stands in there, and beside it, where SGLang has other ones.
_INSIDE = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "structured_outputs.structural_tag": "structural_tag",
    "thinking_token_budget": "custom_params.thinking_budget",
}
_OUTSIDE = {
    "prompt_logprobs_start": "logprob_start_len",
    "routed_experts_prompt_start": "routed_experts_start_len",
}
# Fields of the same name that mean something else in an AnswerRequest, or are refused there.
_NOT_TAKEN_OVER = ("no_stop_trim", "spaces_between_special_tokens")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerateForm:
    """What answers look like. is_list: also a single one stands in a list. with_text: so do texts
    in log-probabilities; with_prompt: and the prompt's ids."""

    is_list: bool
    with_text: bool
    with_prompt: bool


@dataclass(frozen=True, slots=True)
class Generate:
    """A request of /generate."""

    prompts: list[AskedPrompt]
    form: GenerateForm


@dataclass(frozen=True, slots=True)
class PreparedGenerate(PreparedTokens):
    """The same in tokens."""

    form: GenerateForm


def parse_generate(values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> Generate:
    """Of a body's JSON. Raises InvalidRequestError naming the first field that is wrong."""
    body = read(GenerateRequest, values, options)
    field, prompts, several = _prompts(body)
    number = len(prompts)
    adapters = _for_each("lora_path", body.lora_path, None, number)
    sampling = _for_each(SAMPLING, body.sampling_params, GenerateSampling(), number)
    answers = {one.n or 1 for one in sampling}
    if len(answers) > 1:
        raise InvalidRequestError(SAMPLING, f"{SAMPLING} have different n; it must be the same.")
    (n,) = answers
    if number * n > MAX_ANSWERS:
        raise InvalidRequestError(
            field,
            f"{field} has {number} entries and n is {n}; the limit for both together is "
            f"{MAX_ANSWERS} answers.",
        )
    with_logprobs = _for_each("return_logprob", body.return_logprob, False, number)
    starts = _for_each("logprob_start_len", body.logprob_start_len, -1, number)
    tops = _for_each("top_logprobs_num", body.top_logprobs_num, 0, number)
    experts_from = _for_each("routed_experts_start_len", body.routed_experts_start_len, 0, number)
    names = _names(body.rid, number, several)
    asked = []
    for index, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        is_list = isinstance(body.sampling_params, list)
        words = Words(f"{SAMPLING}[{index}]." if is_list else f"{SAMPLING}.", _INSIDE, _OUTSIDE)
        with words.used():
            wanted = _wanted(body, one, tops[index] if with_logprobs[index] else None, options)
            if with_logprobs[index]:
                start, top = starts[index], tops[index]
                wanted = replace(wanted, params=_as_sglangs(wanted.params, start, top))
            if body.return_routed_experts:
                wanted = replace(wanted, params=_routed(wanted.params, experts_from[index]))
        wanted = replace(wanted, called=names[index], adapter=adapters[index] or "")
        name = f"{field}[{index}]" if several else field
        asked.append(AskedPrompt(name, prompt, wanted, words))
    form = GenerateForm(
        several or n > 1, bool(body.return_text_in_logprobs), bool(body.return_prompt_token_ids)
    )
    return Generate(asked, form)


def _wanted(
    body: GenerateRequest,
    sampling: GenerateSampling,
    logprobs: int | None,
    options: ParseOptions,
) -> GenerationRequest:
    """Behind one prompt."""
    longest = sampling.max_new_tokens
    if longest is UNSET:
        longest = Unasked(max(MAX_NEW_TOKENS, sampling.min_new_tokens or 0))
    tag = sampling.structural_tag
    same = {
        name: getattr(sampling, name)
        for name in GenerateSampling.__struct_fields__
        if name in AnswerRequest.__struct_fields__ and name not in _NOT_TAKEN_OVER
    }
    if sampling.temperature is not None and sampling.temperature < GREEDY_BELOW:
        same["temperature"] = 0.0
    answer = AnswerRequest(
        **same,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        structured_outputs=None if tag is None else StructuredOutputs(structural_tag=tag),
        include_stop_str_in_output=sampling.no_stop_trim,
        model=body.model,
        stream=body.stream,
        timeout=body.timeout,
        # SGLang's larger numbers are ours that are smaller.
        priority=-(body.priority or 0),
        cache_salt=_salt(body.cache_salt or "", body.extra_key or ""),
        return_token_ids=True,
    )
    return generation_of(
        answer,
        options,
        max_tokens_field="max_tokens",
        max_tokens=longest,
        logprobs=logprobs,
        thinking_token_budget=_thinking_budget(body, sampling),
    )


def _as_sglangs(params: SamplingParams, start: int, top: int) -> SamplingParams:
    """With log-probabilities: those of an answer are of what it is drawn from, those of the prompt,
    from `start` on, the model's own."""
    params = replace(params, tempered_logprobs=True)
    if start < 0:
        return params
    return replace(params, prompt_logprobs=top, prompt_logprobs_start=start)


def _routed(params: SamplingParams, start: int) -> SamplingParams:
    return replace(params, return_routed_experts=True, routed_experts_prompt_start=start)


def _salt(salt: str, key: str) -> str:
    """One for both; no two pairs have the same."""
    return f"{len(salt)} {salt} {key}" if key else salt


def _thinking_budget(body: GenerateRequest, sampling: GenerateSampling) -> int | None:
    own = None if sampling.custom_params is None else sampling.custom_params.thinking_budget
    budget = own if body.max_thinking_tokens is None else body.max_thinking_tokens
    return None if budget is None or budget < 0 else budget


def _prompts(body: GenerateRequest) -> tuple[str, list[str | list[int]], bool]:
    """The field that holds them, the prompts, and whether they stand in a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError(
            "input_ids", "A prompt is either text or input_ids; give exactly one of them."
        )
    if body.text is not None:
        texts = body.text
        return ("text", [texts], False) if isinstance(texts, str) else ("text", [*texts], True)
    ids: Any = body.input_ids
    kinds = set(map(type, ids))
    if kinds == {int}:
        return "input_ids", [ids], False
    if int in kinds:
        raise InvalidRequestError(
            "input_ids", "input_ids holds token ids beside lists; it must be all of one kind."
        )
    return "input_ids", ids, True


def _for_each(name: str, given: Any, default: T, number: int) -> list[T]:
    """A value for each of so many prompts."""
    if not isinstance(given, list):
        return [default if given is None else given] * number
    if len(given) != number:
        raise InvalidRequestError(
            name,
            f"{name} has {len(given)} entries and there are {number} prompts; give one for each "
            "of them, or one for all.",
        )
    return given


def _names(rid: str | list[str] | None, number: int, several: bool) -> list[str]:
    """What the client calls each prompt; "" where it says nothing."""
    if isinstance(rid, str) and rid and several:
        return [f"{rid}_{index}" for index in range(number)]
    names = _for_each("rid", rid, "", number)
    given = [name for name in names if name]
    if len(set(given)) < len(given) and isinstance(rid, list):
        raise InvalidRequestError("rid", "rid holds the same name twice.")
    return names
