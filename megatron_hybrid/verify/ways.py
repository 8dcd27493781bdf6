"""The same prompts computed in each way that an engine has: cold, warm, continued, in small chunks,
beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.llm import LLM
from megatron_hybrid.request import RequestOutput, SamplingParams, TokenLogprob
from megatron_hybrid.verify.prompts import ANSWER

TOP = 20  # likeliest tokens of each position whose log-probabilities are compared
SMALL_STEP = 37  # tokens of a chunk: no kernel's own


def _params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=TOP)


def _with_prompt() -> SamplingParams:
    return replace(_params(), prompt_logprobs=TOP)


def _short() -> SamplingParams:
    return replace(_params(), max_tokens=1)


@dataclass(frozen=True)
class Row:
    """What the engine says of the token after `position`."""

    position: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Answer:
    """A prompt by its number, what was answered to it, and what was said of each position."""

    prompt: int
    tokens: tuple[int, ...]  # prompt and answer
    answered: int  # tokens of the answer
    cached: int  # tokens of the prompt that were not computed
    rows: list[Row] = field(repr=False)


@dataclass(frozen=True)
class Way:
    """All answers of one way; without any, `why` says why it was not gone."""

    name: str
    answers: list[Answer]
    why: str = ""
    problem: str = ""  # what is wrong whatever the answers are
    reads_states: bool = False  # cached ones, which may be rounded


def go_all_ways(llm: LLM, prompts: list[list[int]]) -> list[Way]:
    """Every rank makes this call."""
    cold = _Runs(llm, prompts)
    return [
        cold.alone("cold", _with_prompt()),
        cold.warm(),
        cold.continued(),
        cold.chunked(),
        cold.batched(),
    ]


class _Runs:
    def __init__(self, llm: LLM, prompts: list[list[int]]) -> None:
        self._llm = llm
        self._prompts = prompts

    def alone(
        self,
        name: str,
        params: SamplingParams | None = None,
        before: Callable[[list[int]], object] = lambda prompt: None,
    ) -> Way:
        """Each prompt by itself, with nothing in the cache but what `before` leaves there."""
        outputs = []
        for prompt in self._prompts:
            self._llm.engine.reset()
            before(prompt)
            outputs += self._generate([prompt], params or _params())
        return _way(name, outputs)

    def warm(self) -> Way:
        if why := self._no_cache():
            return Way("warm", [], why)
        way = self.alone("warm", before=lambda prompt: self._generate([prompt], _short()))
        problem = way.problem
        if not problem and not any(answer.cached for answer in way.answers):
            problem = "no token of any prompt came from the cache the second time"
        return replace(way, problem=problem, reads_states=True)

    def continued(self) -> Way:
        if why := self._no_cache():
            return Way("continued", [], why)
        way = self.alone(
            "continued",
            before=lambda prompt: self._generate([prompt[: len(prompt) * 2 // 3]], _short()),
        )
        return replace(way, reads_states=True)

    def chunked(self) -> Way:
        try:
            with _small_steps(self._llm):
                return self.alone("chunked", _with_prompt())
        except InvalidRequestError:
            return Way("chunked", [], "prompts are not cut (--no-enable-chunked-prefill).")

    def batched(self) -> Way:
        self._llm.engine.reset()
        others = [prompt[5:] for prompt in self._prompts if len(prompt) > 6]
        outputs = self._generate([*self._prompts, *others], _params())
        return _way("batched", outputs[: len(self._prompts)])

    def _generate(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        return self._llm.generate(list(prompts), params, progress=False)

    def _no_cache(self) -> str:
        """Why no prefix can be skipped."""
        cache = self._llm.engine.context.cache
        if not cache.enabled:
            return "prefix caching is off."
        geometry = self._llm.engine.cache_geometry
        if geometry.needs_state and not geometry.num_cached_slots:
            return "no state is cached (--inference-dynamic-batching-prefix-caching-mamba-gb)."
        return ""


@contextmanager
def _small_steps(llm: LLM) -> Iterator[None]:
    context = llm.engine.context
    usual = context.max_tokens
    context.max_tokens = min(SMALL_STEP, usual)
    try:
        yield
    finally:
        context.max_tokens = usual


def _way(name: str, outputs: Sequence[RequestOutput]) -> Way:
    """The answers to all prompts. One that the engine gave up is a problem, however right what came
    of it before."""
    problem = ""
    for number, output in enumerate(outputs):
        if output.error is not None or len(output.token_ids) != ANSWER:
            reason = output.error or f"{len(output.token_ids)} tokens of {ANSWER}"
            problem = f"the answer to prompt {number} was not finished: {reason.rstrip('.')}"
            break
    return Way(name, [_answer(i, output) for i, output in enumerate(outputs)], problem=problem)


def _answer(number: int, output: RequestOutput) -> Answer:
    prompt = output.prompt_token_ids
    rows = [
        _row(position - 1, entry)
        for position, entry in enumerate(output.prompt_logprobs or [])
        if entry is not None
    ]
    rows += [_row(len(prompt) - 1 + i, entry) for i, entry in enumerate(output.logprobs or [])]
    tokens = (*prompt, *output.token_ids)
    return Answer(number, tokens, len(output.token_ids), output.cached_tokens, rows)


def _row(position: int, entry: TokenLogprob) -> Row:
    known = {**dict(entry.top), entry.token_id: entry.logprob}
    return Row(position, list(known), list(known.values()))
