"""One turn of a chat after its prompt: how each of its answers is read and remembered."""

from __future__ import annotations

from megatron_hybrid.server.http.answer_record import AnswerRecord, CompleteAnswer
from megatron_hybrid.server.http.preparation import PreparedChat
from megatron_hybrid.server.http.serving import Serving


class ChatTurn:
    """What belongs to one request besides its prompt."""

    def __init__(self, serving: Serving, chat: PreparedChat) -> None:
        self._serving = serving
        self._chat = chat

    def record(self) -> AnswerRecord | None:
        """For one choice; None if nothing is to be found in it or remembered of it."""
        calling, tools = self._serving.tool_calling, self._chat.tools
        reader = calling.reader(tools)
        if reader is None and self._serving.answers is None:
            return None
        visible = calling.visible_ids if reader is not None else frozenset()
        return AnswerRecord(self._serving.tokenizer, reader, visible, self._remember)

    def _remember(self, answer: CompleteAnswer) -> None:
        if self._serving.answers is None or not answer.generated.token_ids:
            return
        calls = [
            {"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
        key = self._chat.keys.key_of({"content": answer.text, "tool_calls": calls})
        self._serving.answers.remember(key, *answer.generated)
