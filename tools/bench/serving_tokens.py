"""Random tokens for prompts, and how text and token ids are turned into each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.text.tokenizer import Tokenizer

# Checkpoints keep their special tokens here, so no prompt draws them (as in workloads.py).
_RESERVED_IDS = 16


class TokenSource:
    """Draws token ids below `vocab_size`; with a tokenizer it also knows their text."""

    def __init__(
        self, vocab_size: int | None, tokenizer: Tokenizer | None = None, *, as_text: bool = False
    ) -> None:
        """as_text: prompts are text, for endpoints that take no ids; needs the tokenizer."""
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._as_text = as_text
        if as_text and tokenizer is None:
            raise ConfigurationError(
                "A chat takes text: give --tokenizer FOLDER, or measure /v1/completions with "
                "--backend openai."
            )
        self._ids = np.empty(0, dtype=np.int64)
        limit = vocab_size if tokenizer is None else tokenizer.vocab_size
        if limit is not None:
            lowest = _RESERVED_IDS if limit > 4 * _RESERVED_IDS else 0
            ids = range(lowest, limit)
            if tokenizer is not None:
                ids = [i for i in ids if not tokenizer.is_special(i)]  # type: ignore[assignment]
            self._ids = np.array(ids, dtype=np.int64)

    @property
    def vocab_size(self) -> int:
        """Raises ConfigurationError if nobody said it."""
        if self._vocab_size is None:
            raise ConfigurationError(
                "Prompts of random tokens need the vocabulary's size: give --tokenizer FOLDER or "
                "--vocab-size N."
            )
        return self._vocab_size

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Random ids that stand for text; the same for the same generator."""
        if count and not len(self._ids):
            _ = self.vocab_size  # says what is missing
        return generator.choice(self._ids, size=count).tolist() if count else []

    def prompt(self, token_ids: Sequence[int]) -> str | list[int]:
        """What is sent for these ids. Text may be encoded to a few tokens more or less."""
        if self._as_text:
            assert self._tokenizer is not None
            return self._tokenizer.decode(token_ids)
        return list(token_ids)

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Their text; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text, without special ones around it; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def count(self, text: str) -> int:
        """Raises ConfigurationError without a tokenizer."""
        ids = self.encode(text)
        if ids is None:
            raise ConfigurationError("Counting the tokens of a text needs --tokenizer FOLDER.")
        return len(ids)


def load_token_source(
    folder: str | None, vocab_size: int | None, *, as_text: bool = False
) -> TokenSource:
    """folder: a Hugging Face folder. vocab_size: of the model; else from the folder's config.json,
    else the tokenizer's. Raises ConfigurationError for a folder without a tokenizer."""
    if folder is None:
        return TokenSource(vocab_size, as_text=as_text)
    tokenizer = Tokenizer.load(folder)
    if vocab_size is None:
        vocab_size = _model_vocab_size(Path(folder)) or tokenizer.vocab_size
    return TokenSource(vocab_size, tokenizer, as_text=as_text)


def _model_vocab_size(folder: Path) -> int | None:
    """Of the checkpoint, which may be larger than the tokenizer's."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
