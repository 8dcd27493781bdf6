"""The workloads: which requests come when, token by token, the same on every machine.

A workload is a sequence of rounds. A round's requests are all submitted at once, and the next
round begins when the last of them is done. A request appends new tokens to a conversation and
asks for a fixed number of tokens (greedy, end-of-sequence ignored), so its prompt depends on
what the engine answered before:

    workload = make_workload("multi_turn", vocab_size=512, scale=0.05)
    conversations = Conversations()
    for round_ in workload.rounds:
        for request in round_:
            prompt = conversations.prompt(request)
            ...
            conversations.append(request, generated_tokens)

`Workload.digest()` proves that two machines, or two implementations, measure the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Checkpoints keep their special tokens here, so no workload draws them.
_RESERVED_IDS = 16
SHARED_PREFIX = 8192  # tokens of shared_system's system prompt


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """`new_tokens` are appended to `conversation`; exactly `max_tokens` are generated."""

    request_id: str
    conversation: str
    new_tokens: tuple[int, ...]
    max_tokens: int


Round = tuple[WorkloadRequest, ...]


class TokenCounts(NamedTuple):
    """What a workload asks for, as far as the plan alone tells."""

    requests: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    longest: int  # prompt and answer of the longest conversation


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    rounds: tuple[Round, ...]

    def requests(self) -> Iterator[WorkloadRequest]:
        for round_ in self.rounds:
            yield from round_

    def token_counts(self) -> TokenCounts:
        length: dict[str, int] = {}
        requests = prompt = new = output = 0
        for request in self.requests():
            prompt_length = length.get(request.conversation, 0) + len(request.new_tokens)
            length[request.conversation] = prompt_length + request.max_tokens
            requests += 1
            prompt += prompt_length
            new += len(request.new_tokens)
            output += request.max_tokens
        longest = max(length.values(), default=0)
        return TokenCounts(requests, len(self.rounds), prompt, new, output, longest)

    def digest(self) -> str:
        """16 hex digits over every id, length and token, in order."""
        sha = hashlib.sha256()
        for round_ in self.rounds:
            sha.update(b"|round|")
            for request in round_:
                head = f"{request.request_id}/{request.conversation}/{request.max_tokens}:"
                sha.update(head.encode())
                sha.update(np.array(request.new_tokens, dtype="<i8").tobytes())
        return sha.hexdigest()[:16]


class Conversations:
    """All tokens of every conversation so far, prompts and answers."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def prompt(self, request: WorkloadRequest) -> list[int]:
        """What the engine is given: the conversation so far and the request's new tokens."""
        return [*self._tokens.get(request.conversation, ()), *request.new_tokens]

    def append(self, request: WorkloadRequest, generated: Sequence[int]) -> None:
        """Note the answer, once it is complete."""
        self._tokens[request.conversation] = [*self.prompt(request), *generated]


class _Source:
    """Draws tokens and scales sizes.

    A plan's draws come in a fixed order from one generator per (workload, seed): changing the
    order of the calls in a plan below changes its digest.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        seed: int,
        scale: float,
        count_scale: float,
        shared_prefix: int,
    ) -> None:
        name_key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self._generator = np.random.Generator(np.random.PCG64([name_key, seed]))
        self._lowest = _RESERVED_IDS if vocab_size > 4 * _RESERVED_IDS else 0
        self._vocab_size = vocab_size
        self._scale = scale
        self._count_scale = count_scale
        self.shared_prefix = shared_prefix

    def length(self, tokens: int) -> int:
        return max(2, round(tokens * self._scale))

    def count(self, requests: int) -> int:
        # What is alone at full size stays alone; what is many stays more than one.
        return 1 if requests == 1 else max(2, round(requests * self._count_scale))

    def tokens(self, full_length: int) -> tuple[int, ...]:
        size = self.length(full_length)
        return tuple(self._generator.integers(self._lowest, self._vocab_size, size=size).tolist())


def _unique(source: _Source) -> list[Round]:
    """Long prompts that share nothing: what prefix caching costs when it cannot help."""
    answer = source.length(128)
    ids = [f"u{i}" for i in range(source.count(64))]
    return [tuple(WorkloadRequest(id_, id_, source.tokens(4096), answer) for id_ in ids)]


def _shared_system(source: _Source) -> list[Round]:
    """One long system prompt: one request alone first, then all the others at once."""
    answer = source.length(64)
    system = source.tokens(source.shared_prefix)
    ids = [f"s{i}" for i in range(source.count(64))]
    first, *others = [WorkloadRequest(id_, id_, system + source.tokens(256), answer) for id_ in ids]
    return [(first,), tuple(others)]


def _multi_turn(source: _Source) -> list[Round]:
    """Chats behind one system prompt that take their turns together."""
    answer = source.length(128)
    system = source.tokens(2048)
    chats = [f"m{i}" for i in range(source.count(32))]

    def turn(number: int) -> Round:
        return tuple(
            WorkloadRequest(
                f"{chat}.{number}",
                chat,
                system + source.tokens(1024) if number == 0 else source.tokens(512),
                answer,
            )
            for chat in chats
        )

    return [turn(number) for number in range(6)]


def _fork(source: _Source) -> list[Round]:
    """Several samples of each of several prompts, all at once."""
    answer = source.length(128)
    samples = source.count(16)
    requests: list[WorkloadRequest] = []
    for prompt_number in range(source.count(16)):
        prompt = source.tokens(2048)
        ids = [f"f{prompt_number}.{sample}" for sample in range(samples)]
        requests += [WorkloadRequest(id_, id_, prompt, answer) for id_ in ids]
    return [tuple(requests)]


def _decode(batch: int) -> Callable[[_Source], list[Round]]:
    """Short prompts, long answers: the speed of decoding at one batch size."""

    def plan(source: _Source) -> list[Round]:
        answer = source.length(256)
        ids = [f"d{i}" for i in range(source.count(batch))]
        return [tuple(WorkloadRequest(id_, id_, source.tokens(1024), answer) for id_ in ids)]

    return plan


def _long_resume(source: _Source) -> list[Round]:
    """One very long conversation that goes on once."""
    answer = source.length(16)
    return [
        (WorkloadRequest("l.0", "l", source.tokens(65536), answer),),
        (WorkloadRequest("l.1", "l", source.tokens(256), answer),),
    ]


def _prompts(count: int, length: int) -> Callable[[_Source], list[Round]]:
    """Prompts that share nothing, and one token of each answer: the speed of prefill."""

    def plan(source: _Source) -> list[Round]:
        ids = [f"p{i}" for i in range(source.count(count))]
        return [tuple(WorkloadRequest(id_, id_, source.tokens(length), 1) for id_ in ids)]

    return plan


def _in_turn(count: int, length: int) -> Callable[[_Source], list[Round]]:
    """The same, one at a time: how long a request waits that finds nobody there."""

    def plan(source: _Source) -> list[Round]:
        ids = [f"t{i}" for i in range(source.count(count))]
        return [(WorkloadRequest(id_, id_, source.tokens(length), 1),) for id_ in ids]

    return plan


_USUAL: dict[str, Callable[[_Source], list[Round]]] = {
    "unique": _unique,
    "shared_system": _shared_system,
    "multi_turn": _multi_turn,
    "fork": _fork,
    "decode_1": _decode(1),
    "decode_32": _decode(32),
    "decode_256": _decode(256),
    "long_resume": _long_resume,
}
# Three times as many prompt tokens as all the others together.
_LONG_PROMPTS: dict[str, Callable[[_Source], list[Round]]] = {
    "prompts_8k": _prompts(128, 8192),
    "prompts_20k": _prompts(128, 20480),
    "prompts_40k": _prompts(128, 40960),
    "prompt_65k": _prompts(1, 65536),
}
_FIRST_TOKENS: dict[str, Callable[[_Source], list[Round]]] = {
    "first_token_600": _in_turn(16, 600),
    "first_token_1k": _in_turn(16, 1024),
    "first_token_2k": _in_turn(16, 2048),
    "first_token_4k": _in_turn(16, 4096),
}
_PLANS = _USUAL | _LONG_PROMPTS | _FIRST_TOKENS

WORKLOAD_NAMES = tuple(_USUAL)
LONG_PROMPTS = tuple(_LONG_PROMPTS)
IF_NAMED = LONG_PROMPTS + tuple(_FIRST_TOKENS)  # are not among all
DECODES = ("decode_1", "decode_32", "decode_256")


def make_workload(
    name: str,
    vocab_size: int,
    seed: int = 0,
    scale: float = 1.0,
    count_scale: float | None = None,
    shared_prefix: int = SHARED_PREFIX,
) -> Workload:
    """Build a workload; another seed gives other tokens of the same shape.

    scale: multiplies every token length. count_scale: multiplies the number of requests
    (default: the same as scale). Nothing becomes smaller than 2 tokens or 2 requests.
    shared_prefix: tokens of shared_system's system prompt at scale 1; the others have none.
    """
    if name not in _PLANS:
        raise ValueError(f"There is no workload {name!r}; choose from {', '.join(_PLANS)}.")
    if vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; a workload draws from at least 2 tokens.")
    counts = scale if count_scale is None else count_scale
    if not (scale > 0 and counts > 0):
        raise ValueError(f"scale ({scale}) and count_scale ({counts}) must be more than 0.")
    source = _Source(name, vocab_size, seed, scale, counts, shared_prefix)
    return Workload(name, tuple(_PLANS[name](source)))
