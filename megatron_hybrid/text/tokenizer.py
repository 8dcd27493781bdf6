"""Text to token ids and back, for one model folder. Imports no torch."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.models.checkpoints.folder import check_tokenizer
from megatron_hybrid.text.answer_places import (
    GeneratedAnswer,
    Place,
    Slot,
    cut_at,
    encode_around,
    find_places,
)
from megatron_hybrid.text.block_ends import BlockEnd, find_block_ends
from megatron_hybrid.values import validate_text

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
# Whether an assistant's message with tool calls says what a piece of rendered text says.
SameCalls = Callable[[Message, str], bool]
JOINED_CHARACTERS = 256  # more than words have
LAST_ENDS = 7  # messages at a chat's end whose ends are looked for, besides the first one's


class EncodedPrompt(NamedTuple):
    """A prompt in tokens. `message_ends`: in a chat, ascending positions after which a later
    message, or the answer, begins; `block_ends`: those of the blocks that were asked for; as far
    as the template lets us find them."""

    token_ids: list[int]
    message_ends: tuple[int, ...] = ()
    block_ends: tuple[int, ...] = ()


class Ending(enum.Enum):
    """What stands at the end of a chat's prompt: what announces an answer, the end of the last
    message, or its text, which the answer goes on with."""

    ANSWER = "answer"
    NOTHING = "nothing"
    CONTINUED = "continued"


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
        added = self.backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(hf_tokenizer.all_special_ids) | {
            token_id for token_id, token in added.items() if token.special
        }
        self._special_tokens = tuple(
            token for token in map(self.backend.id_to_token, self._special_ids) if token
        )
        # Of a text, that one token stands for. Where a tokenizer may put any number of them into
        # one (white space that it joins, say), a rule of thumb.
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        # Whether every token is a string of bytes, in GPT-2's spelling.
        self.is_byte_level = type(self.backend.decoder).__name__ == "ByteLevel"
        self.most_characters_of_a_token = (
            longest if self.is_byte_level else max(longest, JOINED_CHARACTERS)
        )

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder; ConfigurationError if there is none.

        chat_template: a file with one that takes the place of the folder's own; None: that one.
        ConfigurationError for a file that can't be read, or that is no template.
        """
        path = Path(folder)
        check_tokenizer(path)
        template = None if chat_template is None else _read_chat_template(Path(chat_template))
        try:
            hf_tokenizer = _load_hf_tokenizer(path)
            if template is not None:
                hf_tokenizer.chat_template = template
            return cls(hf_tokenizer)
        except Exception as error:  # transformers raises many kinds for a broken folder
            reason = " ".join(str(error).split())  # and of many lines
            raise ConfigurationError(
                f"{path} has no tokenizer that can be read (tokenizer.json is looked for first): "
                f"{reason}"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Ids that it knows, with added tokens."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Its own end of sequence; models often have more."""
        eos = self._hf.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        """Whether it can render conversations."""
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str:
        """The template's source; of several, the one for tools comes first."""
        template = self._hf.chat_template or ""
        if isinstance(template, Mapping):
            return "\n".join([template.get("tool_use", ""), *map(str, template.values())])
        return str(template)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for descriptions of functions."""
        return re.search(r"\{[%{][^}]*\btools\b", self.chat_template) is not None

    def check_tools(self) -> None:
        """Raise InvalidRequestError for a chat template that has no place for functions."""
        if not self.takes_tools:
            raise InvalidRequestError(
                "tools",
                "This model's chat template has no place for tools; leave tools out.",
                code="unsupported_parameter",
            )

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling; None if the vocabulary has no such token."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether this id stands for no text of the answer: end of sequence, roles, padding."""
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """All of these."""
        return self._special_ids

    def is_added(self, token_id: int) -> bool:
        """Whether this id was added to the vocabulary's, special or not: grammars know it by its id
        and not by its text."""
        return token_id in self._added_ids

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of all of these, by spelling."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id; None if it has none (a padded vocabulary)."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `add_special_tokens`: with those that begin or end every text."""
        # Unlike the backend's `encode`, it lets other threads go on, and looks for no offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; `skip_special_tokens`: without those that stand for none."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not self.is_special(token_id)]
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_arguments: Mapping[str, Any] | None = None,
        tools: Tools = (),
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises InvalidRequestError when the messages, or the template's view of them, are wrong.
        """
        conversation, arguments = self._checked_chat(messages, template_arguments, tools)
        return self.encode(self._render_chat(conversation, arguments), add_special_tokens=False)

    def encode_chat_with_ends(
        self,
        messages: Sequence[Message],
        template_arguments: Mapping[str, Any] | None = None,
        tools: Tools = (),
        *,
        answers: Mapping[int, GeneratedAnswer] | None = None,
        same_calls: SameCalls | None = None,
        check: Callable[[str], None] = lambda text: None,
        ending: Ending = Ending.ANSWER,
        block_ends: Sequence[BlockEnd] = (),
    ) -> EncodedPrompt:
        """What `encode_chat` gives, and where in it the first message and the last ones end.

        A message's end is where the rendering of the chat up to it ends, if the whole begins so.
        Templates that refuse a part of a chat, or render it otherwise, have fewer ends, or none.

        answers: what is known to have been generated, by the message's number; it goes into the
        prompt as these ids wherever the rendered text holds it unchanged. `same_calls` decides that
        for messages with tool calls, which a template may spell otherwise than the model did.
        check: raises for a rendered text that is not worth encoding. block_ends: what else is to be
        found in the prompt.
        """
        conversation, arguments = self._checked_chat(messages, template_arguments, tools)
        text = self._render_chat(conversation, arguments, ending)
        check(text)
        places = self._places(conversation, arguments, text, answers or {}, same_calls, ending)
        token_ids, ends_of_tokens = encode_around(self.backend, text, places)
        # Where each token has ended, and all those before it, in characters.
        token_ends = list(accumulate(ends_of_tokens, max))

        def tokens_before(characters: list[int]) -> tuple[int, ...]:
            # A token that goes on beyond the end does not belong to what ends there.
            return tuple(sorted({bisect_right(token_ends, end) for end in characters} - {0}))

        ends = self._message_ends(conversation, arguments, text)
        blocks: list[int] = []
        if block_ends:
            render = functools.partial(self._apply_template, arguments=arguments, ending=ending)
            blocks = find_block_ends(text, conversation, block_ends, render)
        return EncodedPrompt(token_ids, tokens_before(ends), tokens_before(blocks))

    def render_chat(
        self,
        messages: Sequence[Message],
        template_arguments: Mapping[str, Any] | None = None,
        tools: Tools = (),
        *,
        answer_follows: bool = True,
    ) -> str:
        """The text of a conversation. `answer_follows`: with what announces an answer. Raises
        whatever the template does."""
        conversation, arguments = self._checked_chat(messages, template_arguments, tools)
        ending = Ending.ANSWER if answer_follows else Ending.NOTHING
        return self._apply_template(conversation, arguments, ending)

    def _places(
        self,
        conversation: list[dict[str, Any]],
        arguments: dict[str, Any],
        text: str,
        answers: Mapping[int, GeneratedAnswer],
        same_calls: SameCalls | None,
        ending: Ending,
    ) -> list[Place]:
        """Where the answers stand in the rendered chat, from one more rendering with marks instead
        of them."""
        marks, slots = [], []
        marked = list(conversation)
        for number in sorted(answers):
            message, answer = conversation[number], answers[number]
            same = None
            if message.get("tool_calls"):
                if same_calls is None:
                    continue
                same = functools.partial(same_calls, message)
            mark = f"answer{secrets.token_hex(16)}"
            marked[number] = {k: v for k, v in message.items() if k != "tool_calls"}
            marked[number]["content"] = mark
            marks.append(mark)
            slots.append(Slot(message["content"], answer, same))
        if not slots:
            return []
        try:
            rendered = self._apply_template(marked, arguments, ending)
        except Exception:  # a template may want calls where results of calls follow
            return []
        places = find_places(text, cut_at(rendered, marks), slots)
        return [place for place in places if self._can_be_encoded_apart(text, place.end)]

    def _can_be_encoded_apart(self, text: str, start: int) -> bool:
        """Whether the text from there on has the tokens that it has in the whole."""
        if self.is_byte_level or start == len(text):
            return True
        # Other tokenizers may put a space before text, but none before a special token.
        return any(text.startswith(token, start) for token in self._special_tokens)

    def _checked_chat(
        self,
        messages: Sequence[Message],
        template_arguments: Mapping[str, Any] | None,
        tools: Tools,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "messages",
                "This model has no chat template, so it cannot serve messages; "
                "use /v1/completions with a prompt.",
            )
        if not messages:
            raise InvalidRequestError("messages", "messages is empty; it needs a message at least.")
        arguments = dict(template_arguments or {})
        for name in arguments:
            if name in _template_parameters():
                raise InvalidRequestError(
                    "chat_template_kwargs",
                    f"chat_template_kwargs.{name} is not a variable of the chat template.",
                )
        if tools:
            self.check_tools()
            arguments["tools"] = list(tools)
        return [
            _with_plain_content(message, index) for index, message in enumerate(messages)
        ], arguments

    def _render_chat(
        self,
        conversation: list[dict[str, Any]],
        arguments: dict[str, Any],
        ending: Ending = Ending.ANSWER,
    ) -> str:
        try:
            text = self._apply_template(conversation, arguments, ending)
        except Exception as error:  # templates are the model's code and may raise anything
            raise InvalidRequestError(
                "messages", f"The model's chat template refuses these messages: {error}"
            ) from error
        validate_text("messages", text)
        return text

    def _message_ends(
        self, conversation: list[dict[str, Any]], arguments: dict[str, Any], whole: str
    ) -> list[int]:
        """Where messages end in the rendered chat, in characters."""
        count = len(conversation)
        ends = []
        # Each one costs a rendering, so a long chat's middle is left out.
        for length in sorted({1, *range(max(1, count - LAST_ENDS + 1), count + 1)}):
            try:
                part = self._apply_template(conversation[:length], arguments, Ending.NOTHING)
            except Exception:  # for instance: a chat must not end with the system message
                continue
            if not whole.startswith(part):
                continue
            # Some templates put the system message into a later one.
            if length > 1 or conversation[0]["content"].strip() in part:
                ends.append(len(part))
        return ends

    def _apply_template(
        self, conversation: list[dict[str, Any]], arguments: dict[str, Any], ending: Ending
    ) -> str:
        text: str = self._hf.apply_chat_template(
            conversation,
            add_generation_prompt=ending is Ending.ANSWER,
            continue_final_message=ending is Ending.CONTINUED,
            tokenize=False,
            **arguments,
        )
        return text


def _with_plain_content(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one string; parts that are not text are refused by name."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    name = f"messages[{index}].content"
    if not isinstance(content, list):
        shown = json.dumps(content, default=repr)[:60]
        raise InvalidRequestError(name, f"{name} is {shown}; it must be text or a list of parts.")
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


def _read_chat_template(path: Path) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--chat-template {path} can't be read: {error}.") from error
    if not template.strip():
        raise ConfigurationError(f"--chat-template {path} is empty.")
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"--chat-template {path} is no chat template: line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # many refuse a chat without messages
        return template
    return template


def _load_hf_tokenizer(path: Path) -> Any:
    # AutoTokenizer pulls in torch; a tokenizer.json needs only the tokenizers library.
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what fails is raised, too
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(
            f"its tokenizer ({type(tokenizer).__name__}) cannot be turned into a tokenizer.json."
        )
    return tokenizer


@functools.cache
def _template_parameters() -> frozenset[str]:
    """Arguments of apply_chat_template itself, which a request must not set."""
    from transformers import PreTrainedTokenizerBase

    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(names) - {"kwargs"} | {"messages"}
