"""Texts that an answer must not hold, as token ids: what vLLM's `bad_words` means by them."""

from __future__ import annotations

from dataclasses import replace

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_BAD_WORD_TOKENS, SamplingParams
from megatron_hybrid.text.tokenizer import Tokenizer


def with_token_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same with `bad_words` in token ids: each word's own, and those that it has behind a
    space, as in the middle of a text. Other ways to spell it are not looked for.

    Raises InvalidRequestError for a word of too many tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            found.append(word)
            continue
        own = _ids(word.lstrip() or word, tokenizer)
        found.append(own)
        within = _ids(f" {word.lstrip()}", tokenizer) if word.strip() else own
        if within[-len(own) :] != own:  # else it says no more
            found.append(within)
    return replace(params, bad_words=tuple(found)) if found else params


def _ids(word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(word, add_special_tokens=False))
    if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            "bad_words",
            f"bad_words holds {word!r}, which is {len(ids)} tokens; it must be 1 to "
            f"{MAX_BAD_WORD_TOKENS}.",
        )
    return ids
