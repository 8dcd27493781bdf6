"""What a request asks for and what it gets back. No tensors, no engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from megatron_hybrid.routed_experts import RoutedExperts
from megatron_hybrid.values import (
    as_pairs,
    as_texts,
    as_tuple,
    as_words,
    check_integer,
    check_number,
    check_tuple,
    plain,
    show,
    validate_text,
    wrong,
)

# Which of them bounds prompt and answer together: see DynamicInferenceContext.
CONTEXT_FLAG = "--inference-max-seq-length"
BUFFER_FLAG = "--inference-dynamic-batching-buffer-size-gb"
MAX_TOKENS = 2**31 - 1  # of an answer; no token id is larger either
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 128  # of one prompt
MAX_PRIORITY = 1000
MAX_CACHE_CHECKPOINTS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_PENALTY = 2.0  # of presence and frequency
MAX_REPETITION_PENALTY = 100.0
# The least ones that are not 0, and give no infinite logits, in float32.
MIN_REPETITION_PENALTY = 0.01
MIN_TOP_P = 1e-10
MAX_TIME = 1e12  # seconds of a clock
MAX_NAME_LENGTH = 1024  # characters of a salt or an id
GRAMMAR_KINDS = ("json_schema", "regex", "lark", "structural_tag")
MAX_GRAMMAR_LENGTH = 2**20


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like.

    kind: "json_schema" (text: the schema as JSON), "regex", "lark" (llguidance's dialect, in which
    a rule can be `%json {schema}`), or "structural_tag" (xgrammar's format as JSON; see
    text/structural_tags.py).
    field: what the client calls it, for what is said of it.
    """

    kind: str
    text: str
    field: str = "response_format"

    def validate(self) -> None:
        """Raise InvalidRequestError unless its kind is known and its text has a size that can be
        read; `megatron_hybrid.text.grammar.check` reads it."""
        if self.kind not in GRAMMAR_KINDS:
            known = ", ".join(GRAMMAR_KINDS)
            words = f"has a grammar of kind {show(self.kind)}; known are {known}"
            raise wrong(self.field, words)
        validate_text(self.field, self.text, MAX_GRAMMAR_LENGTH)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens an answer may think before its thoughts are ended, and what thoughts are.

    tokens: of its own, between the marks. begin, end: the marks around thoughts, each in any of
    these spellings. close: the ids of the one that ends them then. opened: the prompt has begun
    them; else the answer thinks if it begins with a mark.
    """

    tokens: int
    begin: tuple[str, ...]
    end: tuple[str, ...]
    close: tuple[int, ...]
    opened: bool

    def validate(self, name: str) -> None:
        """Raise InvalidRequestError, which names that field, for what can't be held to."""
        check_integer(name, self.tokens, 0, MAX_TOKENS)
        for mark in (*self.begin, *self.end):
            validate_text(name, mark, MAX_NAME_LENGTH)
        if not all((*self.begin, *self.end)) or not self.end or not self.close:
            raise wrong(name, "must have marks that are not empty, and one that ends thoughts")
        _validate_ids(name, self.close, MAX_NAME_LENGTH)


class Unasked(int):
    """A number that nobody has asked for: where fewer fit, it is as many as fit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. What holds several values takes any sequence,
    and numbers may be numpy's; nothing is checked before `validate`.

    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off. min_p: 0 is off.
    max_tokens: None means as many as fit; so does the default where fewer than these fit. With 0
        the prompt is computed, and nothing is generated.
    seed: the same seed gives the same tokens whatever else is in the batch; None lets the
        engine choose one.
    stop: a string, or several, that end the text (not part of it). stop_token_ids: ids that end
        it, besides the model's own end-of-sequence ids, which `ignore_eos` switches off.
    logprobs: log-probabilities of the sampled token and of this many most likely ones.
    prompt_logprobs: the same for every prompt token but the first; such a request skips nothing.
        prompt_logprobs_start: only from this position in the prompt on; then what is cached of the
        tokens before is skipped, but for the last of them.
    presence_penalty: subtracted from the logit of every token that the answer holds;
        frequency_penalty: times how often it does; both -2 to 2. repetition_penalty: divides
        positive logits and multiplies negative ones of tokens in prompt or answer (Keskar et al.,
        2019); 0.01 to 100; 1 is off. The last one comes first.
    logit_bias: by token id, what is added to its logit, -100 to 100: a mapping, or pairs.
    allowed_token_ids: no other ids are chosen; none means all. An answer ends by itself only if an
        end-of-sequence id is among them. Not beside `grammar`.
    bad_words: token ids, several of them each, that never stand one behind the other in the answer,
        unless nothing else may come; LLM and the server take texts, too (see text/bad_words.py).
    min_tokens: no end-of-sequence id, nor one of `stop_token_ids`, before this many tokens.
    grammar: the answer matches it, unless `max_tokens` or a stop cuts it short. It ends when the
        grammar is complete, also before `min_tokens`.
    thinking_token_budget: after so many tokens of thoughts the mark comes that ends them, with 0 at
        once; None: when the model wants. LLM and the server take a number; the engine has to be
        told what thoughts are (see text/thinking.py).
    Log-probabilities are the model's own, before any of these; with `tempered_logprobs` those of
        the answer are after its temperature, where 0 counts as 1, and before all else.
    return_routed_experts: give the experts that each token was sent to; None: if the engine keeps
        them. routed_experts_prompt_start: only from this position in the prompt on.
    n: answers to the same prompt; each draws from its own stream of the seed, the first one as with
        n = 1. The prompt is computed once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = Unasked(128)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    thinking_token_budget: int | ThinkingBudget | None = None
    tempered_logprobs: bool = False
    return_routed_experts: bool | None = False
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        """Tuples and plain numbers, where the values can be turned into them."""
        for name in (*_NUMBERS, *_WHOLE_NUMBERS, *_FLAGS, "thinking_token_budget"):
            value = getattr(self, name)
            if type(value) not in _PLAIN_TYPES:
                object.__setattr__(self, name, plain(value))
        for name, converted in _SEQUENCES.items():
            value = getattr(self, name)
            if type(value) is not tuple or value:
                object.__setattr__(self, name, converted(value))

    def validate(self) -> None:
        """Raise InvalidRequestError naming a field that is out of range."""
        for name, (low, high) in _NUMBERS.items():
            check_number(name, getattr(self, name), low, high)
        for name, (least, most) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                check_integer(name, value, least, most)
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _MAY_BE_NONE):
                raise wrong(name, f"is {show(value)}; it must be true or false")
        check_tuple("stop", self.stop, "text, or a sequence of texts")
        for text in self.stop:
            validate_text("stop", text)
            if not text:
                raise wrong("stop", "must hold non-empty strings")
        _validate_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _validate_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        wanted = "a mapping, or pairs, of token ids and numbers"
        check_tuple("logit_bias", self.logit_bias, wanted, MAX_LOGIT_BIASES)
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                words = f"holds {show(entry)}; it must hold pairs of a token id and a number"
                raise wrong("logit_bias", words)
            check_integer("logit_bias", entry[0], 0, MAX_TOKENS)
            check_number("logit_bias", entry[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise wrong("logit_bias", "names a token id twice")
        wanted = "a text, or a sequence of texts and sequences of token ids"
        check_tuple("bad_words", self.bad_words, wanted, MAX_BAD_WORDS)
        for word in self.bad_words:
            if isinstance(word, str):
                validate_text("bad_words", word, MAX_BAD_WORD_LENGTH)
            else:
                _validate_ids("bad_words", word, MAX_BAD_WORD_TOKENS)
            if not word:
                raise wrong("bad_words", "must hold words that are not empty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            words = f"is {self.min_tokens}; it must be at most max_tokens, which is "
            raise wrong("min_tokens", words + str(self.max_tokens))
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            words = f"is {self.prompt_logprobs_start}, which needs prompt_logprobs"
            raise wrong("prompt_logprobs_start", words)
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar):
                raise wrong("grammar", f"is {show(self.grammar)}; it must be a Grammar")
            self.grammar.validate()
            if self.allowed_token_ids:
                raise wrong("allowed_token_ids", f"does not go with {self.grammar.field}")
        budget, name = self.thinking_token_budget, "thinking_token_budget"
        if isinstance(budget, ThinkingBudget):
            budget.validate(name)
        elif budget is not None:
            check_integer(name, budget, 0, MAX_TOKENS)

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a field that names an id that the model does not have, or
        that still holds texts, which only its tokenizer turns into ids."""
        if any(isinstance(word, str) for word in self.bad_words):
            raise wrong("bad_words", "holds text; where there is no tokenizer it must be token ids")
        budget = self.thinking_token_budget
        if isinstance(budget, int):
            words = "is a number; the engine has to be told what thoughts are: a ThinkingBudget"
            raise wrong("thinking_token_budget", words)
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_words", [int(token) for word in self.bad_words for token in word]),
            ("thinking_token_budget", () if budget is None else budget.close),
        ):
            if (largest := max(ids, default=0)) >= vocab_size:
                words = f"names token id {largest}; the model knows 0 to {vocab_size - 1}"
                raise wrong(name, words)

    def longest_answer(
        self, length: int, limit: int, flag: str, name: str = "max_tokens", prompt: str = "prompt"
    ) -> int:
        """The most tokens of an answer to a prompt of this length. `limit`: of both together, as
        `flag` says. `name`, `prompt`: what the client calls them. Raises InvalidRequestError if
        what was asked for does not fit."""
        if (start := self.prompt_logprobs_start) >= length and start:
            words = f"is {start}, but the last of {length} tokens of {prompt} is at {length - 1}"
            raise wrong("prompt_logprobs_start", words)
        if (start := self.routed_experts_prompt_start) > length:
            words = f"is {start}, but {prompt} has {length} tokens"
            raise wrong("routed_experts_prompt_start", words)
        wanted, room = self.max_tokens, limit - length
        if wanted is None or isinstance(wanted, Unasked):
            wanted = room if wanted is None else min(room, int(wanted))
        for asked, tokens in ((name, wanted), ("min_tokens", self.min_tokens)):
            if tokens > room:
                words = f"is {tokens}, but {prompt} has {length} tokens and the limit for both "
                raise wrong(asked, f"{words}together is {limit} ({flag})", status=413)
        return wanted

    @property
    def reads_answer(self) -> bool:
        """Whether the engine has to know the answer's text, for which it needs a tokenizer."""
        return self.grammar is not None or self.thinking_token_budget is not None

    @property
    def is_penalised(self) -> bool:
        """Whether what has been written changes what comes next."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are not chosen from the model's own logits."""
        return bool(self.adjusts_every_step or self.min_tokens)

    @property
    def adjusts_every_step(self) -> bool:
        """The same, from the first token to the last."""
        return bool(
            self.is_penalised or self.logit_bias or self.allowed_token_ids or self.bad_words
            or self.grammar is not None
        )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0.0


_NUMBERS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (MIN_TOP_P, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
_WHOLE_NUMBERS = {
    "top_k": (-1, MAX_TOKENS),
    "n": (1, MAX_CHOICES),
    "max_tokens": (0, MAX_TOKENS),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs_start": (0, MAX_TOKENS),
    "routed_experts_prompt_start": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
}
_FLAGS = ("ignore_eos", "tempered_logprobs", "return_routed_experts")
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "return_routed_experts")
_PLAIN_TYPES = (float, int, type(None), bool, Unasked, ThinkingBudget)


_SEQUENCES = {
    "stop": as_texts, "stop_token_ids": as_tuple, "logit_bias": as_pairs,
    "allowed_token_ids": as_tuple, "bad_words": as_words,
}  # fmt: skip


class RequestStatus(enum.Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    """Why a request ended; OpenAI's words where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position: the token that stands there and the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class VersionSpan(NamedTuple):
    """Tokens [start, end) of an answer are of the weights that are called so."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class RequestEvent:
    """What one step did for one request; the engine's only output.

    `token_ids` are new since the last event. `finish_reason` is set on a request's last event,
    which comes exactly once for every choice of every submitted request. `stop_token_id` is the id
    that ended it (that id is the last of `token_ids`). `weight_version`: of the weights that gave
    them. `logprobs` has one entry for each new token, a plain number where only the chosen tokens'
    are wanted; `prompt_logprobs` comes with the first token of choice 0, or the end where no token
    is wanted: one entry per prompt token from `prompt_logprobs_start` on, None for the prompt's
    first. `error` says why it failed, and `error_field` which field is to blame, if one is. With
    the last event come `counters` (see docs/prefix_cache.md) and `routed_experts`. With the first
    token come the seconds that it waited until it ran, which the last event has again, and those
    from there to this token.
    """

    request_id: str
    index: int = 0  # which of the request's n answers
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = ""
    logprobs: list[TokenLogprob | float] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    error_field: str | None = None
    counters: dict[str, int] | None = None
    routed_experts: RoutedExperts | None = None
    queue_seconds: float | None = field(default=None, compare=False)
    prefill_seconds: float | None = field(default=None, compare=False)

    @property
    def has_news(self) -> bool:
        """Whether it says more than that the request was taken."""
        return bool(self.token_ids) or self.finish_reason is not None

    def token_logprobs(self) -> list[TokenLogprob]:
        """Of each new token, all in one form; none if they are not wanted."""
        return [
            TokenLogprob(token, one) if isinstance(one, float) else one
            for token, one in zip(self.token_ids, self.logprobs or (), strict=False)
        ]


@dataclass(slots=True)
class RequestOutput:
    """A request's whole result, as `LLM.generate` returns it.

    With n > 1 it is the first answer, and `choices` holds all of them, itself included.
    `routed_experts` [positions, layers, top_k], if asked for, is what RoutedExperts says; None of
    an answer that ended before its prompt was computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    counters: dict[str, int] | None = None  # what the cache did for it: see docs/prefix_cache.md
    routed_experts: npt.NDArray[Any] | None = field(default=None, repr=False, compare=False)
    weight_versions: list[VersionSpan] = field(default_factory=list)  # several: see update_weights
    index: int = 0
    choices: list[RequestOutput] = field(default_factory=list, repr=False, compare=False)


def _validate_ids(name: str, ids: tuple[int, ...], limit: int) -> None:
    check_tuple(name, ids, "a sequence of token ids", limit)
    for token in ids:
        check_integer(name, token, 0, MAX_TOKENS)
