"""Prompts for a serving benchmark: generated ones and files, with `vllm bench serve`'s settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.serving_requests import ServingRequest
from bench.serving_tokens import TokenSource

# vLLM's limits for ShareGPT: what is longer or shorter is left out.
_SHAREGPT_SHORTEST = 4
_SHAREGPT_LONGEST_PROMPT = 1024
_SHAREGPT_LONGEST = 2048


class DatasetError(ValueError):
    """A dataset that cannot be made or read; the message is for the user."""


class RandomLengths(NamedTuple):
    """Lengths in tokens. `range_ratio`: both are drawn from [1 - ratio, 1 + ratio] times that."""

    input: int = 1024
    output: int = 128
    prefix: int = 0
    range_ratio: float = 0.0


class PrefixRepetition(NamedTuple):
    """`num_prefixes` prefixes, each of which begins an equal share of the prompts. In tokens."""

    prefix: int = 256
    suffix: int = 256
    num_prefixes: int = 10
    output: int = 128


def random_requests(
    count: int, lengths: RandomLengths, tokens: TokenSource, generator: np.random.Generator
) -> list[ServingRequest]:
    """Prompts of random tokens behind one common prefix (none where its length is 0)."""
    if not 0 <= lengths.range_ratio < 1:
        raise DatasetError(
            f"--random-range-ratio is {lengths.range_ratio}; it must be at least 0 and below 1."
        )
    prefix = tokens.draw(lengths.prefix, generator)
    inputs = _spread(lengths.input, lengths.range_ratio, count, generator)
    outputs = _spread(lengths.output, lengths.range_ratio, count, generator)
    return [
        ServingRequest(
            f"random-{i}",
            tokens.prompt([*prefix, *tokens.draw(inputs[i], generator)]),
            outputs[i],
        )
        for i in range(count)
    ]


def prefix_repetition_requests(
    count: int, sizes: PrefixRepetition, tokens: TokenSource, generator: np.random.Generator
) -> list[ServingRequest]:
    """A few prefixes, many endings; shuffled, so that a prefix's prompts don't come in a row."""
    each = count // sizes.num_prefixes
    if each == 0:
        raise DatasetError(
            f"--num-prompts is {count}, fewer than --prefix-repetition-num-prefixes "
            f"({sizes.num_prefixes}); every prefix needs a prompt."
        )
    requests = []
    for number in range(sizes.num_prefixes):
        prefix = tokens.draw(sizes.prefix, generator)
        for i in range(each):
            prompt = tokens.prompt([*prefix, *tokens.draw(sizes.suffix, generator)])
            requests.append(ServingRequest(f"prefix-{number}-{i}", prompt, sizes.output))
    return [requests[i] for i in generator.permutation(len(requests))]


def custom_requests(
    path: Path,
    count: int,
    output_len: int,
    generator: np.random.Generator,
    *,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[ServingRequest]:
    """One JSON object a line: "prompt" (text, token ids or a chat's messages), and with an
    `output_len` of -1 also "output_tokens". The prompt is sent as it is."""
    requests = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
            answer = int(entry["output_tokens"]) if output_len == -1 else output_len
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"Line {number} of --dataset-path {path} is not of the form "
                '{"prompt": "..."' + (', "output_tokens": 100}' if output_len == -1 else "}") + "."
            ) from error
        requests.append(ServingRequest(f"custom-{number}", prompt, answer))
    return _sample(requests, count, path, generator, shuffle=shuffle, oversample=oversample)


def sharegpt_requests(
    path: Path,
    count: int,
    output_len: int | None,
    tokens: TokenSource,
    generator: np.random.Generator,
    *,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[ServingRequest]:
    """First question of each conversation; as many tokens as the answer had, or `output_len`."""
    requests = []
    for number, (question, answer) in enumerate(_sharegpt_pairs(path)):
        asked = tokens.count(question)
        wanted = tokens.count(answer) if output_len is None else output_len
        if asked < _SHAREGPT_SHORTEST or (output_len is None and wanted < _SHAREGPT_SHORTEST):
            continue
        if asked > _SHAREGPT_LONGEST_PROMPT or asked + wanted > _SHAREGPT_LONGEST:
            continue
        requests.append(ServingRequest(f"sharegpt-{number}", question, wanted))
    return _sample(requests, count, path, generator, shuffle=shuffle, oversample=oversample)


def read_json(path: Path) -> Any:
    """Raises DatasetError that names the file."""
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}.") from error


def _sharegpt_pairs(path: Path) -> Iterator[tuple[str, str]]:
    data = read_json(path)
    try:
        for entry in data:
            turns = entry.get("conversations", entry.get("conversation", []))
            if len(turns) >= 2:
                yield str(turns[0]["value"]), str(turns[1]["value"])
    except (AttributeError, KeyError, TypeError) as error:
        raise DatasetError(
            f"--dataset-path {path} is no list of ShareGPT conversations ({error!r})."
        ) from error


def _sample(
    requests: list[ServingRequest],
    count: int,
    path: Path,
    generator: np.random.Generator,
    *,
    shuffle: bool,
    oversample: bool,
) -> list[ServingRequest]:
    if not requests:
        raise DatasetError(f"--dataset-path {path} has no prompt that can be used.")
    if shuffle:
        requests = [requests[i] for i in generator.permutation(len(requests))]
    if len(requests) >= count or not oversample:
        return requests[:count]
    return [requests[i % len(requests)] for i in range(count)]


def _spread(length: int, ratio: float, count: int, generator: np.random.Generator) -> Sequence[int]:
    low, high = int(length * (1 - ratio)), int(np.ceil(length * (1 + ratio)))
    if low < 1:
        raise DatasetError(f"A length of {length} tokens with ratio {ratio} may be below 1 token.")
    return [int(value) for value in generator.integers(low, high, size=count, endpoint=True)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}.") from error
