"""Text to token ids and back, for one model folder. Imports no torch."""

from __future__ import annotations

import inspect
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError

Message = Mapping[str, Any]
LAST_ENDS = 7  # messages at a chat's end whose ends are looked for, besides the first one's


class EncodedPrompt(NamedTuple):
    """A prompt in tokens. `message_ends`: in a chat, ascending positions after which a later
    message, or the answer, begins; those that the template lets us find."""

    token_ids: list[int]
    message_ends: tuple[int, ...] = ()


class Tokenizer:
    """A Hugging Face tokenizer and its chat template.

    Encoding and decoding go straight to the `tokenizers` library: transformers' own wrappers
    change truncation settings on every call, which fails when several threads encode at once.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.backend = hf_tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self._special_ids = frozenset(hf_tokenizer.all_special_ids) | {
            token_id
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        }

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder; ConfigurationError if there is none."""
        path = Path(folder)
        if not path.is_dir():
            raise ConfigurationError(f"--load names {path}, which is not a folder.")
        try:
            return cls(_load_hf_tokenizer(path))
        except Exception as error:  # transformers raises many kinds for a broken folder
            raise ConfigurationError(
                f"The folder {path} has no tokenizer that can be read (looked for tokenizer.json "
                f"and tokenizer.model): {error}"
            ) from error

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._hf.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def is_special(self, token_id: int) -> bool:
        """Whether this id stands for no text of the answer: end of sequence, roles, padding."""
        return token_id in self._special_ids

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id; None if it has none (a padded vocabulary)."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not self.is_special(token_id)]
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def encode_chat(
        self, messages: Sequence[Message], template_arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises InvalidRequestError when the messages, or the template's view of them, are wrong.
        """
        conversation, arguments = self._checked_chat(messages, template_arguments)
        return self.encode(self._render_chat(conversation, arguments), add_special_tokens=False)

    def encode_chat_with_ends(
        self, messages: Sequence[Message], template_arguments: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """What `encode_chat` gives, and where in it the first message and the last ones end.

        A message's end is where the rendering of the chat up to it ends, if the whole begins so.
        Templates that refuse a part of a chat, or render it otherwise, have fewer ends, or none.
        """
        conversation, arguments = self._checked_chat(messages, template_arguments)
        text = self._render_chat(conversation, arguments)
        encoding = self.backend.encode(text, add_special_tokens=False)
        characters = self._message_ends(conversation, arguments, text)
        # Where each token has ended, and all those before it, in characters.
        token_ends = list(accumulate((end for _, end in encoding.offsets), max))
        # A token that goes on beyond the message does not belong to it.
        ends = {bisect_right(token_ends, end) for end in characters} - {0}
        return EncodedPrompt(encoding.ids, tuple(sorted(ends)))

    def _checked_chat(
        self, messages: Sequence[Message], template_arguments: Mapping[str, Any] | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "messages",
                "This model has no chat template, so it cannot serve messages; "
                "use /v1/completions with a prompt.",
            )
        arguments = dict(template_arguments or {})
        for name in arguments:
            if name in _TEMPLATE_PARAMETERS:
                raise InvalidRequestError(
                    "chat_template_kwargs",
                    f"chat_template_kwargs.{name} is not a variable of the chat template.",
                )
        return [_flatten(message, index) for index, message in enumerate(messages)], arguments

    def _render_chat(self, conversation: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        try:
            return self._apply_template(conversation, arguments, answer_follows=True)
        except Exception as error:  # templates are the model's code and may raise anything
            raise InvalidRequestError(
                "messages", f"The model's chat template refuses these messages: {error}"
            ) from error

    def _message_ends(
        self, conversation: list[dict[str, Any]], arguments: dict[str, Any], whole: str
    ) -> list[int]:
        """Where messages end in the rendered chat, in characters."""
        count = len(conversation)
        ends = []
        # Each one costs a rendering, so a long chat's middle is left out.
        for length in sorted({1, *range(max(1, count - LAST_ENDS + 1), count + 1)}):
            try:
                part = self._apply_template(conversation[:length], arguments, answer_follows=False)
            except Exception:  # for instance: a chat must not end with the system message
                continue
            if not whole.startswith(part):
                continue
            # Some templates put the system message into a later one.
            if length > 1 or conversation[0]["content"].strip() in part:
                ends.append(len(part))
        return ends

    def _apply_template(
        self, conversation: list[dict[str, Any]], arguments: dict[str, Any], *, answer_follows: bool
    ) -> str:
        text: str = self._hf.apply_chat_template(
            conversation, add_generation_prompt=answer_follows, tokenize=False, **arguments
        )
        return text


def _load_hf_tokenizer(path: Path) -> Any:
    # AutoTokenizer pulls in torch; a tokenizer.json needs only the tokenizers library.
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(
            f"its tokenizer ({type(tokenizer).__name__}) cannot be turned into a tokenizer.json."
        )
    return tokenizer


def _template_parameters() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


# Arguments of apply_chat_template itself, which a request must not set.
_TEMPLATE_PARAMETERS = _template_parameters() - {"kwargs"} | {"messages"}


def _flatten(message: Message, index: int) -> dict[str, Any]:
    """The message with its content as one string; parts that are not text are refused by name."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    name = f"messages[{index}].content"
    if not isinstance(content, list):
        raise InvalidRequestError(
            name, f"{name} is {json.dumps(content)[:60]}; it must be text or a list of parts."
        )
    texts = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{name}[{position}].type",
                f"{name}[{position}].type is {kind!r}; only 'text' is supported.",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{name}[{position}].text", f"{name}[{position}].text is missing or not a string."
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
