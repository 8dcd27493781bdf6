"""A chat's choices: how their thoughts and calls are read, and what of them is remembered."""

from __future__ import annotations

from megatron_hybrid.server.http.choice import Choice
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.prepared import PreparedChat
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.tool_calls.formats import Call
from megatron_hybrid.text.answer_places import GeneratedAnswer
from megatron_hybrid.text.reasoning import ReasoningSplitter


def start_chat(serving: Serving, chat: PreparedChat, generation: Generation) -> None:
    """Begin to answer; raises what `Generation.start` raises."""

    def make_choice(index: int) -> Choice:
        form, visible = serving.reasoning, serving.reasoning_marks
        splitter = None if form is None else ReasoningSplitter(form, chat.begins)
        reader = serving.tool_calling.reader(chat.tools)
        if reader is not None:
            visible |= serving.tool_calling.visible_ids
        on_end = None if serving.answers is None else remember
        wanted = chat.generation
        return Choice(index, serving.tokenizer, wanted, reader, visible, on_end, splitter)

    def remember(text: str, calls: list[Call], generated: GeneratedAnswer) -> None:
        if serving.answers is None or not generated.token_ids:
            return
        called = [{"function": call._asdict()} for call in calls]
        key = chat.keys.key_of({"content": text, "tool_calls": called})
        serving.answers.remember(key, *generated)

    generation.start([chat.prompt], make_choice, chat.message_ends)
