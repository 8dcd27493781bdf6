"""What a request asks for and what it gets back. No tensors, no engine."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.errors import InvalidRequestError

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
MAX_PENALTY = 2.0  # of presence and frequency
MAX_REPETITION_PENALTY = 100.0
# The least ones that are not 0, and give no infinite logits, in float32.
MIN_REPETITION_PENALTY = 0.01
MIN_TOP_P = 1e-10
MAX_TIME = 1e12  # seconds of a clock
MAX_NAME_LENGTH = 1024  # characters of a salt or an id
GRAMMAR_KINDS = ("json_schema", "regex", "lark")
MAX_GRAMMAR_LENGTH = 2**20


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like.

    kind: "json_schema" (text: the schema as JSON), "regex", or "lark" (llguidance's dialect, in
    which a rule can be `%json {schema}`).
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
            raise _wrong(self.field, words)
        validate_text(self.field, self.text, MAX_GRAMMAR_LENGTH)


class Unasked(int):
    """A number that nobody has asked for: where fewer fit, it is as many as fit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. What holds several values takes any sequence,
    and numbers may be numpy's; nothing is checked before `validate`.

    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off. min_p: 0 is off.
    max_tokens: None means as many as fit; so does the default where fewer than these fit.
    seed: the same seed gives the same tokens whatever else is in the batch; None lets the
        engine choose one.
    stop: a string, or several, that end the text (not part of it). stop_token_ids: ids that end
        it, besides the model's own end-of-sequence ids, which `ignore_eos` switches off.
    logprobs: log-probabilities of the sampled token and of this many most likely ones.
    prompt_logprobs: the same for every prompt token but the first; such a request skips nothing.
    presence_penalty: subtracted from the logit of every token that the answer holds;
        frequency_penalty: times how often it does; both -2 to 2. repetition_penalty: divides
        positive logits and multiplies negative ones of tokens in prompt or answer (Keskar et al.,
        2019); 0.01 to 100; 1 is off. The last one comes first.
    logit_bias: by token id, what is added to its logit, -100 to 100: a mapping, or pairs.
    min_tokens: no end-of-sequence id, nor one of `stop_token_ids`, before this many tokens.
    grammar: the answer matches it, unless `max_tokens` or a stop cuts it short. It ends when the
        grammar is complete, also before `min_tokens`.
    Log-probabilities are the model's own, before any of these.
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
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Tuples and plain numbers, where the values can be turned into them."""
        for name in (*_NUMBERS, *_WHOLE_NUMBERS, "ignore_eos"):
            value = getattr(self, name)
            if type(value) not in _PLAIN_TYPES:
                object.__setattr__(self, name, _plain(value))
        for name, as_tuple in _SEQUENCES.items():
            value = getattr(self, name)
            if type(value) is not tuple or value:
                object.__setattr__(self, name, as_tuple(value))

    def validate(self) -> None:
        """Raise InvalidRequestError naming a field that is out of range."""
        for name, (low, high) in _NUMBERS.items():
            _number(name, getattr(self, name), low, high)
        for name, (least, most) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _integer(name, value, least, most)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", f"is {show(self.ignore_eos)}; it must be true or false")
        _is_tuple("stop", self.stop, "text, or a sequence of texts")
        for text in self.stop:
            validate_text("stop", text)
            if not text:
                raise _wrong("stop", "must hold non-empty strings")
        ids = self.stop_token_ids
        _is_tuple("stop_token_ids", ids, "a sequence of token ids", MAX_STOP_TOKEN_IDS)
        for token in ids:
            _integer("stop_token_ids", token, 0, MAX_TOKENS)
        wanted = "a mapping, or pairs, of token ids and numbers"
        _is_tuple("logit_bias", self.logit_bias, wanted, MAX_LOGIT_BIASES)
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                words = f"holds {show(entry)}; it must hold pairs of a token id and a number"
                raise _wrong("logit_bias", words)
            _integer("logit_bias", entry[0], 0, MAX_TOKENS)
            _number("logit_bias", entry[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise _wrong("logit_bias", "names a token id twice")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            words = f"is {self.min_tokens}; it must be at most max_tokens, which is "
            raise _wrong("min_tokens", words + str(self.max_tokens))
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar):
                raise _wrong("grammar", f"is {show(self.grammar)}; it must be a Grammar")
            self.grammar.validate()

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if `logit_bias` names an id that the model does not have."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                words = f"names token id {token}; the model knows 0 to {vocab_size - 1}"
                raise _wrong("logit_bias", words)

    def longest_answer(
        self, length: int, limit: int, flag: str, name: str = "max_tokens", prompt: str = "prompt"
    ) -> int:
        """The most tokens of an answer to a prompt of this length. `limit`: of both together, as
        `flag` says. `name`, `prompt`: what the client calls them. Raises InvalidRequestError if
        what was asked for does not fit."""
        wanted, room = self.max_tokens, limit - length
        if wanted is None or isinstance(wanted, Unasked):
            wanted = room if wanted is None else min(room, int(wanted))
        for asked, tokens in ((name, wanted), ("min_tokens", self.min_tokens)):
            if tokens > room:
                words = f"is {tokens}, but {prompt} has {length} tokens and the limit for both "
                raise _wrong(asked, f"{words}together is {limit} ({flag})", status=413)
        return wanted

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
        return bool(
            self.is_penalised or self.logit_bias or self.min_tokens or self.grammar is not None
        )

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
    "max_tokens": (1, MAX_TOKENS),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "min_tokens": (0, MAX_TOKENS),
}
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_PLAIN_TYPES = (float, int, type(None), bool, Unasked)


def _plain(value: Any) -> Any:
    """A number of numpy's, or of a library like it, as Python's; others as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _tuple(values: Any) -> Any:
    """Any sequence as a tuple of plain values, None as an empty one; others as they are."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return values
    return tuple(map(_plain, values))


def _texts(values: Any) -> Any:
    return (values,) if isinstance(values, str) else _tuple(values)


def _pairs(biases: Any) -> Any:
    """A mapping, or a sequence of pairs, as a tuple of pairs of plain values."""
    entries = _tuple(biases.items() if isinstance(biases, Mapping) else biases)
    return tuple(map(_tuple, entries)) if isinstance(entries, tuple) else entries


_SEQUENCES = {"stop": _texts, "stop_token_ids": _tuple, "logit_bias": _pairs}


class PauseMode(enum.StrEnum):
    """What becomes of requests that have begun when the engine is paused.

    FINISH: they go on to their end. ABORT: they end at once. KEEP: they stop where they stand, and
    go on when the engine does. Those that have not begun wait, in their order.
    """

    FINISH = "finish"
    ABORT = "abort"
    KEEP = "keep"


PAUSE_MODES = tuple(mode.value for mode in PauseMode)


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


@dataclass(slots=True)
class RequestEvent:
    """What one step did for one request; the engine's only output.

    `token_ids` are new since the last event. `finish_reason` is set on a request's last event,
    which comes exactly once for every choice of every submitted request. `stop_token_id` is the id
    that ended it (that id is the last of `token_ids`). `logprobs` has one entry for each new token;
    `prompt_logprobs` comes with the first token of choice 0: one entry per prompt token, None for
    the first. `error` says why it failed, and `error_field` which field of the request is to blame,
    if one is. With the last event come `counters` (see docs/prefix_cache.md) and, if it ever ran,
    the seconds that it waited for that.
    """

    request_id: str
    index: int = 0  # which of the request's n answers
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    error_field: str | None = None
    counters: dict[str, int] | None = None
    queue_seconds: float | None = field(default=None, compare=False)


@dataclass(slots=True)
class RequestOutput:
    """A request's whole result, as `LLM.generate` returns it.

    With n > 1 it is the first answer, and `choices` holds all of them, itself included.
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
    index: int = 0
    choices: list[RequestOutput] = field(default_factory=list, repr=False, compare=False)


def validate_priority(priority: object) -> None:
    """Raise InvalidRequestError unless it is a priority: a smaller number runs first."""
    _integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def validate_arrival(arrived: object) -> None:
    """Raise InvalidRequestError unless it is a time of a clock, in seconds, or None."""
    if arrived is not None:
        _number("arrived", arrived, -MAX_TIME, MAX_TIME)


def validate_text(name: str, value: object, max_length: int | None = None) -> None:
    """Raise InvalidRequestError unless it is text, in valid Unicode and not too long."""
    if not isinstance(value, str):
        raise _wrong(name, f"is {show(value)}; it must be text")
    if max_length is not None and len(value) > max_length:
        raise _wrong(name, f"has {len(value)} characters; the limit is {max_length}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        words = f"is not valid Unicode: character {error.start} is half of a surrogate pair"
        raise _wrong(name, words) from error


def validate_whole_numbers(name: str, values: Sequence[object] | npt.NDArray[Any]) -> None:
    """Raise InvalidRequestError unless it holds whole numbers alone, Python's or numpy's."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        if values.dtype.kind in "iu":
            return
    elif not isinstance(values, Sequence):
        raise _wrong(name, f"is {show(values)}; it must be a sequence of whole numbers")
    # by type, of which there are few: there may be 100,000 values
    kinds = set(map(type, values))
    wrong = {kind for kind in kinds if kind is bool or not issubclass(kind, Integral)}
    if wrong:
        bad = next(value for value in values if type(value) in wrong)
        raise _wrong(name, f"holds {show(bad)}; it must hold whole numbers alone")


def validate_cache_checkpoints(positions: Sequence[object], prompt_tokens: int) -> None:
    """Raise InvalidRequestError unless these are positions in a prompt of that many tokens."""
    name, limit = "cache_checkpoints", MAX_CACHE_CHECKPOINTS
    validate_whole_numbers(name, positions)
    if len(positions) > limit:
        raise _wrong(name, f"has {len(positions)} positions; the limit is {limit}")
    for position in positions:
        _integer(name, position, 1, prompt_tokens)


def validate_prompt(
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    vocab_size: int,
    max_seq_length: int,
    field_name: str = "prompt",
    *,
    flag: str = CONTEXT_FLAG,
) -> None:
    """Raise InvalidRequestError unless the prompt has tokens, all known, and room for an answer."""
    validate_whole_numbers(field_name, token_ids)
    if len(token_ids) == 0:
        raise _wrong(field_name, "is empty; it needs a token at least")
    if len(token_ids) >= max_seq_length:
        raise _wrong(
            field_name,
            f"has {len(token_ids)} tokens and leaves no room for an answer: the limit for prompt "
            f"and answer together is {max_seq_length} ({flag})",
            status=413,
        )
    ids = np.asarray(token_ids)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        bad = show(int(low if low < 0 else high))
        raise _wrong(field_name, f"holds token id {bad}; the model knows 0 to {vocab_size - 1}")


def _wrong(name: str, words: str, status: int = 400) -> InvalidRequestError:
    return InvalidRequestError(name, f"{name} {words}.", status)


def _number(name: str, value: object, low: float, high: float) -> None:
    # NaN is in no range
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok:
        raise _wrong(name, f"is {show(value)}; it must be a number from {low} to {high}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    whole = isinstance(value, (int, Integral))
    if not whole or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise _wrong(name, f"is {show(value)}; it must be a whole number from {low} to {high}")


def _is_tuple(name: str, value: object, wanted: str, limit: int | None = None) -> None:
    if not isinstance(value, tuple):
        raise _wrong(name, f"is {show(value)}; it must be {wanted}")
    if limit is not None and len(value) > limit:
        raise _wrong(name, f"has {len(value)} ids; the limit is {limit}")


def show(value: object) -> str:
    """What it is, cut short."""
    try:
        return reprlib.repr(value)
    except Exception:  # for instance: an integer of 5,000 digits
        return f"of type {type(value).__name__}"
