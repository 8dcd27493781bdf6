"""What comes with a prompt besides SamplingParams, and the prompt itself: InvalidRequestError for
values that can't be."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import (
    CONTEXT_FLAG,
    MAX_CACHE_CHECKPOINTS,
    MAX_NAME_LENGTH,
    MAX_PRIORITY,
    MAX_TIME,
    SamplingParams,
)
from megatron_hybrid.routed_experts import FLAG
from megatron_hybrid.values import check_integer, check_number, show, validate_text, wrong


def validate_names(**names: object) -> None:
    """Raise InvalidRequestError unless each is a text of at most MAX_NAME_LENGTH characters."""
    for name, text in names.items():
        validate_text(name, text, MAX_NAME_LENGTH)


def validate_params(params: object, vocab_size: int) -> None:
    """Raise InvalidRequestError unless these are SamplingParams for a model of such a
    vocabulary."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            "params", f"params is of type {type(params).__name__}; it must be SamplingParams."
        )
    params.validate()
    params.validate_vocabulary(vocab_size)


def validate_priority(priority: object) -> None:
    """Raise InvalidRequestError unless it is a priority: a smaller number runs first."""
    check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def validate_arrival(arrived: object) -> None:
    """Raise InvalidRequestError unless it is a time of a clock, in seconds, or None."""
    if arrived is not None:
        check_number("arrived", arrived, -MAX_TIME, MAX_TIME)


def validate_whole_numbers(name: str, values: Sequence[object] | npt.NDArray[Any]) -> None:
    """Raise InvalidRequestError unless it holds whole numbers alone, Python's or numpy's."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        if values.dtype.kind in "iu":
            return
    elif not isinstance(values, Sequence):
        raise wrong(name, f"is {show(values)}; it must be a sequence of whole numbers")
    # by type, of which there are few: there may be 100,000 values
    kinds = set(map(type, values))
    others = {kind for kind in kinds if kind is bool or not issubclass(kind, Integral)}
    if others:
        bad = next(value for value in values if type(value) in others)
        raise wrong(name, f"holds {show(bad)}; it must hold whole numbers alone")


def validate_cache_checkpoints(positions: Sequence[object], prompt_tokens: int) -> None:
    """Raise InvalidRequestError unless these are positions in a prompt of that many tokens."""
    name, limit = "cache_checkpoints", MAX_CACHE_CHECKPOINTS
    validate_whole_numbers(name, positions)
    if len(positions) > limit:
        raise wrong(name, f"has {len(positions)} positions; the limit is {limit}")
    for position in positions:
        check_integer(name, position, 1, prompt_tokens)


def validate_prompt(
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    vocab_size: int,
    max_seq_length: int,
    field_name: str = "prompt",
    *,
    flag: str = CONTEXT_FLAG,
) -> npt.NDArray[np.integer[Any]]:
    """The prompt. Raises InvalidRequestError unless it has tokens, all known, and leaves room for
    an answer."""
    validate_whole_numbers(field_name, token_ids)
    if len(token_ids) == 0:
        raise wrong(field_name, "is empty; it needs a token at least")
    if len(token_ids) >= max_seq_length:
        raise wrong(
            field_name,
            f"has {len(token_ids)} tokens and leaves no room for an answer: the limit for prompt "
            f"and answer together is {max_seq_length} ({flag})",
            status=413,
        )
    ids = _as_array(token_ids)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        bad = show(int(low if low < 0 else high))
        raise wrong(field_name, f"holds token id {bad}; the model knows 0 to {vocab_size - 1}")
    return ids


def _as_array(token_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(token_ids, np.ndarray):
        return token_ids
    try:
        return np.fromiter(token_ids, dtype=np.int32, count=len(token_ids))
    except OverflowError:
        return np.asarray(token_ids, dtype=object)


def validate_routed_experts(params: SamplingParams, *, are_kept: bool) -> None:
    """Raise InvalidRequestError where experts are asked for that are not kept."""
    if params.return_routed_experts and not are_kept:
        words = f"is true, but experts are kept only by an engine that is started with {FLAG}"
        raise wrong("return_routed_experts", words)


def validate_in_one_step(length: int, most: int) -> None:
    """Raise InvalidRequestError for a prompt that would be computed in several."""
    if length > most:
        raise wrong(
            "prompt",
            f"has {length} tokens; without --enable-chunked-prefill the limit is {most} "
            "(--inference-dynamic-batching-max-tokens)",
        )
