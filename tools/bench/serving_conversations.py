"""Chats of several turns for a serving benchmark: from a file, or generated.

Both kinds of input file are those of vLLM's benchmarks/multi_turn/benchmark_serving_multi_turn.py
(`--input-file`): a list of {"id": ..., "messages": [{"role": ..., "content": ...}, ...]}, or an
object with "filetype": "generate_conversations" whose sizes are distributions:

    {"filetype": "generate_conversations", "num_conversations": 24,
     "prompt_input": {
         "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
         "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
         "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
         "num_tokens": {"distribution": "uniform", "min": 120, "max": 160}},
     "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}}}

`num_turns` counts messages of both sides. The text is random tokens (with a tokenizer) or random
words, of which most are a token each; "text_files" are read instead where they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving_datasets import DatasetError, read_json
from bench.serving_tokens import TokenSource

# What is generated without --input-file.
DEFAULT_CONVERSATIONS: Mapping[str, Any] = {
    "filetype": "generate_conversations",
    "num_conversations": 24,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 6, "max": 12},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 256},
        "prefix_num_tokens": {"distribution": "uniform", "min": 64, "max": 256},
        "num_tokens": {"distribution": "uniform", "min": 64, "max": 128},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 64, "max": 128}},
}

_WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which "
    "but have an had they you were there one all we can her has been if more when will would who "
    "so no out up into than them only time new some could these two may then do first any my now "
    "such like other how over man me even most made after also did many before must through back "
    "years where much your way well down should because each just those people how too little good"
).split()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and how many tokens the answer may have (None: --limit-max-tokens)."""

    text: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    conversation_id: str
    turns: tuple[Turn, ...]
    system: str | None = None

    @property
    def num_messages(self) -> int:
        """Of both sides, as --max-turns counts them."""
        return 2 * len(self.turns)


def load_conversations(
    path: Path | None, tokens: TokenSource, generator: np.random.Generator
) -> list[Conversation]:
    """From this file, or generated with DEFAULT_CONVERSATIONS. Raises DatasetError."""
    value = DEFAULT_CONVERSATIONS if path is None else read_json(path)
    if isinstance(value, list):
        return _parse_conversations(value, path, tokens)
    if isinstance(value, Mapping) and value.get("filetype") == "generate_conversations":
        try:
            folder = Path(".") if path is None else path.parent
            return generate_conversations(value, tokens, generator, folder)
        except (KeyError, TypeError) as error:
            raise DatasetError(f"--input-file {path} has no usable {error}.") from error
    raise DatasetError(
        f"--input-file {path} is neither a list of conversations nor an object with "
        '"filetype": "generate_conversations".'
    )


def generate_conversations(
    settings: Mapping[str, Any],
    tokens: TokenSource,
    generator: np.random.Generator,
    folder: Path = Path("."),
) -> list[Conversation]:
    """Raises KeyError or TypeError for missing settings, DatasetError for wrong ones.

    folder: where the names in "text_files" start.
    """
    asked, answered = settings["prompt_input"], settings["prompt_output"]
    write = _writer(settings.get("text_files", ()), folder, tokens, generator)
    constant_0 = {"distribution": "constant", "value": 0}

    def size(where: Mapping[str, Any], name: str, default: Any = None) -> int:
        # A missing size is a KeyError that names it.
        spec = where[name] if default is None else where.get(name, default)
        return draw(name, spec, generator)

    common = write(size(asked, "common_prefix_num_tokens", constant_0))
    conversations = []
    for number in range(int(settings["num_conversations"])):
        turns = []
        for i in range(max(1, size(asked, "num_turns") // 2)):
            text = write(max(1, size(asked, "num_tokens")))
            if i == 0:
                own = write(size(asked, "prefix_num_tokens", constant_0))
                text = " ".join(part for part in (common, own, text) if part)
            turns.append(Turn(text, max(1, size(answered, "num_tokens"))))
        conversations.append(Conversation(f"generated-{number}", tuple(turns)))
    return conversations


def draw(name: str, spec: Mapping[str, Any], generator: np.random.Generator) -> int:
    """A whole number of a distribution; DatasetError if it is none of those that there are."""
    kind = spec.get("distribution")
    try:
        if kind == "constant":
            value = float(spec["value"])
        elif kind == "uniform":
            value = float(generator.integers(spec["min"], spec["max"], endpoint=True))
        elif kind == "lognormal":
            value = float(generator.lognormal(*_lognormal(spec)))
        elif kind == "zipf":
            value = float(generator.zipf(spec["alpha"]))
        elif kind == "poisson":
            value = float(generator.poisson(spec["alpha"]))
        else:
            raise DatasetError(
                f"{name} has the distribution {kind!r}; use constant, uniform, lognormal, zipf or "
                "poisson."
            )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{name}'s distribution {dict(spec)} is wrong: {error}.") from error
    if "max" in spec:
        value = min(value, spec["max"])
    return max(0, round(value))


def _lognormal(spec: Mapping[str, Any]) -> tuple[float, float]:
    """Mean and sigma of the normal distribution below it."""
    if "average" not in spec:
        return float(spec["mean"]), float(spec["sigma"])
    ratio = float(spec.get("median_ratio", 0.85))
    if not 0 < ratio < 1:
        raise ValueError(f"median_ratio is {ratio}, it must be between 0 and 1")
    # The median is exp(mean), the average exp(mean + sigma^2 / 2).
    return float(np.log(spec["average"] * ratio)), float(np.sqrt(-2 * np.log(ratio)))


def _writer(
    files: Sequence[str], folder: Path, tokens: TokenSource, generator: np.random.Generator
) -> Callable[[int], str]:
    """Writes text of about this many tokens."""
    if files:
        try:
            text = "\n".join((folder / name).read_text(encoding="utf-8") for name in files)
        except OSError as error:
            raise DatasetError(
                f"{error.filename} of text_files cannot be read: {error.strerror}."
            ) from error
        ids = tokens.encode(text)
        pieces: Sequence[Any] = text.split() if ids is None else ids

        def from_files(count: int) -> str:
            start = int(generator.integers(0, max(1, len(pieces) - count)))
            part = pieces[start : start + count]
            return (" ".join(part) if ids is None else tokens.text(part)) or ""

        return from_files

    def from_nothing(count: int) -> str:
        if tokens.text([]) is not None:
            return tokens.text(tokens.draw(count, generator)) or ""
        return " ".join(generator.choice(_WORDS, size=count))

    return from_nothing


def _parse_conversations(
    value: list[Any], path: Path | None, tokens: TokenSource
) -> list[Conversation]:
    conversations = []
    for number, entry in enumerate(value):
        try:
            system, turns = _parse_messages(entry["messages"], tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"Conversation {number} of --input-file {path} is not of the form "
                '{"id": ..., "messages": [{"role": "user", "content": "..."}, {"role": '
                f'"assistant", ...}}, ...]}}: {error}.'
            ) from error
        if turns:
            name = str(entry.get("id", number))
            conversations.append(Conversation(name, tuple(turns), system))
    if not conversations:
        raise DatasetError(f"--input-file {path} has no conversation with a user's message.")
    return conversations


def _parse_messages(
    messages: list[Mapping[str, str]], tokens: TokenSource
) -> tuple[str | None, list[Turn]]:
    system = None
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        wanted = "user" if i % 2 == 0 else "assistant"
        if message["role"] != wanted:
            raise ValueError(f"message {i} is of {message['role']!r}, not of {wanted!r}")
        if wanted == "user":
            turns.append(Turn(message["content"]))
        else:  # the answer in the file says how long ours may be
            ids = tokens.encode(message["content"])
            turns[-1] = Turn(turns[-1].text, None if ids is None else max(1, len(ids)))
    return system, turns
