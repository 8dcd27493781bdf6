"""The turns of a body of /v1/messages as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.protocol import messages as chats
from megatron_hybrid.server.http.protocol.anthropic import (
    MAX_CACHE_MARKS,
    AnyText,
    CountTokensRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from megatron_hybrid.server.http.protocol.tools import Arguments, Call, CalledFunction
from megatron_hybrid.text.block_ends import BlockEnd
from megatron_hybrid.text.tokenizer import Ending

_ERROR = "Error: "

Block = AnyText | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Conversation:
    """The turns of a body as messages of a chat, how the prompt ends, and where marks of the cache
    stand in it."""

    def __init__(self, body: CountTokensRequest, *, later_system: bool) -> None:
        """later_system: the chat template takes system messages that do not stand at the beginning;
        else they are the user's."""
        _check_number_of_marks(body)
        self.messages: list[chats.AnyMessage] = []
        self._ends: list[BlockEnd] = []
        turns = [("system", _blocks(body.system or ""))] if body.system else []
        turns += [(_role(turn), _blocks(turn.content)) for turn in body.messages]
        first = next((n for n, (role, _) in enumerate(turns) if role != "system"), 0)
        if not later_system:
            later = [("user" if role == "system" else role, one) for role, one in turns[first:]]
            turns[first:] = later
        for role, same in groupby(turns, key=lambda turn: turn[0]):
            blocks = [block for _, content in same for block in content]
            if role == "assistant":
                self._add_answer(blocks)
            else:
                self._add_said(role, blocks)
        self.ending = self._end(f"messages[{len(body.messages) - 1}].content")

    def _end(self, path: str) -> Ending:
        """A last answer without anything in it is left out. path: of the last turn's content."""
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, chats.AssistantMessage):
            return Ending.ANSWER
        if last.tool_calls:
            raise InvalidRequestError(
                path, f"{path} ends the chat with a tool_use; what came of it has to follow."
            )
        if not last.content and not last.reasoning_content:
            self.messages.pop()
            return Ending.ANSWER
        if not str(last.content or "").strip():
            raise InvalidRequestError(
                path, f"{path} has no text, which an answer that is gone on with needs."
            )
        return Ending.CONTINUED

    def marks(self, body: CountTokensRequest) -> tuple[BlockEnd, ...]:
        """Of the prompt's blocks that have one; those at the prompt's end need none."""
        ends, count = list(self._ends), len(self.messages)
        if any(tool.cache_control for tool in body.tools or ()):
            # Wherever the template puts them, they are there when the first question begins.
            told = sum(type(one) is chats.SystemMessage for one in self.messages[:1])
            ends.append(BlockEnd(told, 0))
        if body.cache_control is not None and count:
            ends.append(BlockEnd(count - 1, len(str(self.messages[-1].content or ""))))
        return tuple(end for end in ends if end.message < count)

    def _add_said(self, role: str, blocks: Sequence[Block]) -> None:
        """What is not an answer: texts between results of calls, each a message."""
        kind = chats.UserMessage if role == "user" else chats.SystemMessage
        for is_result, some in groupby(blocks, key=lambda one: isinstance(one, ToolResultBlock)):
            if is_result:
                for block in some:
                    self._add_result(block)
                continue
            texts: list[str] = []
            for block in some:
                assert isinstance(block, AnyText)
                texts.append(block.text)
                if block.cache_control is not None:
                    self._ends.append(BlockEnd(len(self.messages), len("\n".join(texts))))
            if any(texts) or role == "user":
                self.messages.append(kind(content="\n".join(texts)))

    def _add_result(self, block: Block) -> None:
        assert isinstance(block, ToolResultBlock)
        parts = _blocks(block.content or "")
        text = "\n".join(part.text for part in parts if isinstance(part, AnyText))
        text = _ERROR + text if block.is_error else text
        if any(one.cache_control is not None for one in (block, *_texts(parts))):
            self._ends.append(BlockEnd(len(self.messages), len(text)))
        self.messages.append(chats.ToolMessage(tool_call_id=block.tool_use_id, content=text))

    def _add_answer(self, blocks: Sequence[Block]) -> None:
        """Its texts are pieces of one, as they are in answers of ours."""
        calls = [
            Call(
                type="function",
                function=CalledFunction(name=block.name, arguments=Arguments(block.input)),
                id=block.id,
            )
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        self.messages.append(
            chats.AssistantMessage(
                content="".join(block.text for block in _texts(blocks)),
                tool_calls=calls or None,
                reasoning_content="".join(thoughts) or None,
            )
        )
        if any(getattr(block, "cache_control", None) is not None for block in blocks):
            self._ends.append(BlockEnd(len(self.messages), 0))  # where the next one begins


def _check_number_of_marks(body: CountTokensRequest) -> None:
    said = [body.system or "", *(turn.content for turn in body.messages)]
    blocks = [block for content in said for block in _blocks(content)]
    results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    blocks += [part for content in results for part in _blocks(content or "")]
    marked = [*blocks, *(body.tools or ()), body]
    count = sum(getattr(one, "cache_control", None) is not None for one in marked)
    if count > MAX_CACHE_MARKS:
        raise InvalidRequestError(
            "cache_control",
            f"cache_control stands at {count} places; the limit is {MAX_CACHE_MARKS}.",
        )


def _role(turn: Any) -> str:
    return str(turn.__struct_config__.tag)


def _blocks(content: Any) -> list[Block]:
    return [TextBlock(text=content)] if isinstance(content, str) else list(content)


def _texts(blocks: Sequence[Block]) -> Iterator[AnyText]:
    return (block for block in blocks if isinstance(block, AnyText))
