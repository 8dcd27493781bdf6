"""PromptEncoder: what callers of an LLM give as prompts, chats and answers, in token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeGuard

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request_checks import validate_whole_numbers
from megatron_hybrid.text.tokenizer import EncodedPrompt, Tokenizer
from megatron_hybrid.values import show, validate_text


class PromptEncoder:
    """`tokenizer`: gives it when it is first needed; token ids work without one. All raise
    InvalidRequestError, which calls what is wrong by its name."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer

    def prompts(self, prompts: object) -> list[EncodedPrompt]:
        """Of one prompt, or of several."""
        if _is_one(prompts):
            return [self.prompt(prompts, "prompt")]
        several = _as_list(prompts)
        if not is_sequence(several):
            raise wrong_kind("prompts", prompts, "text, token ids, or a list of prompts")
        return [self.prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(several)]

    def answers(self, answers: object, prompts: object) -> list[list[tuple[str, list[int]]]]:
        """Of one prompt, or of several, by prompt: what errors call each answer, and its ids."""
        several = [answers] if _is_one(prompts) else _as_list(answers)
        count = 1 if _is_one(prompts) else len(_as_list(prompts))
        if not is_sequence(several) or len(several) != count:
            wanted = f"a list of {count}: for each prompt an answer, or a list of several"
            raise wrong_kind("answers", answers, wanted)
        found = []
        for i, behind in enumerate(map(_as_list, several)):
            name = f"answers[{i}]"
            named = [(name, behind)]
            if is_sequence(behind) and behind and not _is_one(behind):
                named = [(f"{name}[{j}]", one) for j, one in enumerate(behind)]
            found.append([(n, self.prompt(one, n, special=False).token_ids) for n, one in named])
        return found

    def prompt(self, prompt: object, name: str, *, special: bool = True) -> EncodedPrompt:
        """`special`: a text gets special tokens."""
        if isinstance(prompt, str):
            validate_text(name, prompt)
            return EncodedPrompt(self._tokenizer().encode(prompt, add_special_tokens=special))
        token_ids = _as_list(prompt)
        if not is_sequence(token_ids):
            raise wrong_kind(name, prompt, "text or token ids")
        validate_whole_numbers(name, token_ids)
        return EncodedPrompt([int(token) for token in token_ids])

    def chat(self, messages: object, name: str) -> EncodedPrompt:
        """Of one chat."""
        if not is_sequence(messages):
            raise wrong_kind(name, messages, "a list of messages")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                wanted = "a message, with its role and content"
                raise wrong_kind(f"{name}[{i}]", message, wanted)
        return self._tokenizer().encode_chat_with_ends(messages)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list or the like, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def begins_with(kind: type, values: object) -> bool:
    """Whether it is a sequence whose first entry is one of these."""
    return is_sequence(values) and len(values) > 0 and isinstance(values[0], kind)


def wrong_kind(name: str, value: object, wanted: str) -> InvalidRequestError:
    """What to raise for a value that is not what it must be."""
    return InvalidRequestError(name, f"{name} is {show(value)}; it must be {wanted}.")


def _is_one(prompts: object) -> bool:
    """Whether it is a prompt, or an answer, and not a list of them."""
    return isinstance(prompts, str) or begins_with(Number, _as_list(prompts))


def _as_list(value: Any) -> Any:
    """An array of numpy's, or of a library like it, as lists; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value
