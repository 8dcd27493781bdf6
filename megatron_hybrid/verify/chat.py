"""What lies around the weights: the chat template, what ends an answer, how functions are called
and thoughts are written. No weight is needed for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.tool_calls.formats import ToolFormat, choose_format
from megatron_hybrid.server.http.tool_calls.reader import read_answer
from megatron_hybrid.text.reasoning import ReasoningFormat, choose, split
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.verify.report import Check, differs, not_checked, ok

QUESTION, ANSWER, RESULT = "zebra question 41", "zebra answer 17", "zebra result 23"
SYSTEM, THOUGHT = "zebra system 5", "zebra thought 61"
_USER = {"role": "user", "content": QUESTION}
_ASSISTANT = {"role": "assistant", "content": ANSWER}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
_NAME, _ARGUMENTS = "get_weather", {"city": "Rome", "days": 3}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "The weather.", "parameters": _SCHEMA},
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": _NAME, "arguments": dict(_ARGUMENTS)},
        }
    ],
}
_THINKING = re.compile(r"<think>|</think>|reasoning_content")


def check_chat(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int, parser: str = "auto"
) -> Iterator[Check]:
    """`eos_token_ids`: what ends an answer here; `vocab_size`: the model's; `parser`: as for
    --tool-call-parser."""
    yield _check_vocabulary(tokenizer, vocab_size)
    if not tokenizer.has_chat_template:
        why = "there is no chat template."
        yield not_checked("chat template", why)
        yield from _check_ends(tokenizer, eos_token_ids, vocab_size, None)
        for name in ("tool calls", "reasoning"):
            yield not_checked(name, why)
        return
    yield _check_template(tokenizer)
    end = _end_of_turn(tokenizer)
    yield from _check_ends(tokenizer, eos_token_ids, vocab_size, end)
    yield _check_tools(tokenizer, parser, end)
    yield _check_reasoning(tokenizer)


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Check:
    name, known = "vocabulary", tokenizer.vocab_size
    beyond = [one for one in range(vocab_size, known) if tokenizer.token(one) is not None]
    of_text = [one for one in beyond if not tokenizer.is_special(one)]
    if of_text:
        return differs(
            name,
            f"{len(of_text)} of the tokenizer's {known} tokens, from {of_text[0]} on, have no row "
            f"in the model, which has {vocab_size}.",
        )
    if beyond:
        return ok(name, f"{len(beyond)} special tokens have no row in the model: no text has them.")
    return ok(name, f"{known} tokens in the tokenizer, {vocab_size} rows in the model.")


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    answer_follows: bool = True,
    **variables: Any,
) -> str | None:
    """None: the template refuses these messages."""
    try:
        return tokenizer.render_chat(messages, variables, tools, answer_follows=answer_follows)
    except Exception:  # templates are the model's code and may raise anything
        return None


def _check_template(tokenizer: Tokenizer) -> Check:
    name = "chat template"
    text = _render(tokenizer, [_USER])
    if text is None:
        return differs(name, "it refuses a chat of one question.")
    if QUESTION not in text:
        return differs(name, "a question is not in what it makes of a chat.")
    several = _render(tokenizer, [_USER, _ASSISTANT, _USER])
    if several is None or ANSWER not in several:
        return differs(name, "it refuses or drops an earlier answer.")
    without = _render(tokenizer, [_USER], answer_follows=False)
    if without is not None and len(text) <= len(without) and not text.rstrip().endswith("]"):
        return differs(name, "nothing in it announces the answer (add_generation_prompt).")
    try:
        tokenizer.encode_chat([_USER])
    except InvalidRequestError as error:
        return differs(name, str(error))
    system = _render(tokenizer, [{"role": "system", "content": SYSTEM}, _USER])
    if system is None or SYSTEM not in system:
        return ok(name, "it renders chats, but no system message.")
    return ok(name, "it renders system, user and assistant messages, and announces the answer.")


def _end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The special token behind an answer in a rendered chat."""
    text = _render(tokenizer, [_USER, _ASSISTANT], answer_follows=False)
    if text is None:  # some want a question last
        text = _render(tokenizer, [_USER, _ASSISTANT, _USER])
    if text is None or ANSWER not in text:
        return None
    behind = text.rpartition(ANSWER)[2] if text.count(ANSWER) else ""
    ids = tokenizer.encode(behind.strip(), add_special_tokens=False)
    return tokenizer.token(ids[0]) if ids and tokenizer.is_special(ids[0]) else None


def _check_ends(
    tokenizer: Tokenizer, eos: Sequence[int], vocab_size: int, end_of_turn: str | None
) -> Iterator[Check]:
    name = "end tokens"
    shown = ", ".join(f"{one} ({tokenizer.token(one)})" for one in eos) or "none"
    strange = [one for one in eos if not 0 <= one < vocab_size]
    turn = None if end_of_turn is None else tokenizer.token_id(end_of_turn)
    if strange:
        yield differs(name, f"{strange} are no tokens of the model, which has {vocab_size}.")
    elif not eos:
        yield differs(
            name, "the model names none (eos_token_id): answers go on until their max_tokens."
        )
    elif turn is not None and turn not in eos:
        yield differs(
            name,
            f"the chat template ends an answer with {turn} ({end_of_turn}), which is not among the "
            f"model's: {shown}. Answers would go on behind it.",
        )
    elif turn is None and tokenizer.eos_token_ids and not set(tokenizer.eos_token_ids) & set(eos):
        own = tokenizer.eos_token_ids[0]
        yield differs(
            name, f"the tokenizer's is {own} ({tokenizer.token(own)}), the model's are {shown}."
        )
    else:
        of_turn = "" if turn is None else f"; the template ends an answer with {turn}"
        yield ok(name, f"{shown}{of_turn}.")


def _check_tools(tokenizer: Tokenizer, parser: str, end_of_turn: str | None) -> Check:
    name = "tool calls"
    if not tokenizer.takes_tools:
        return not_checked(name, "not supported: the chat template has no place for functions.")
    form = choose_format(tokenizer, parser)
    if form is None:
        return differs(
            name,
            "the chat template takes functions, but calls are in no format that is known here: "
            "they stay text unless --tool-call-parser names one.",
        )
    text = _render(tokenizer, [_USER, _CALL], tools=[_TOOL], answer_follows=False)
    if text is None:  # some want the result too
        result = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": RESULT}
        text = _render(tokenizer, [_USER, _CALL, result], tools=[_TOOL], answer_follows=False)
    if text is None or QUESTION not in text:
        return differs(name, "the chat template refuses an answer that calls a function.")
    answer = _after_question(tokenizer, text, form, end_of_turn)
    _, calls = read_answer(form, {_NAME: _SCHEMA}, answer)
    if [(call.name, call.arguments) for call in calls] != [(_NAME, _ARGUMENTS)]:
        return differs(
            name, f"a call as the chat template writes it is not read back (format {form.name})."
        )
    result = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": RESULT}
    with_result = _render(tokenizer, [_USER, _CALL, result], tools=[_TOOL])
    if with_result is None or RESULT not in with_result:
        return differs(name, "the chat template refuses or drops what a function returned.")
    return ok(name, f"format {form.name}: a call is read back as the template writes it.")


def _after_question(
    tokenizer: Tokenizer, text: str, form: ToolFormat, end_of_turn: str | None
) -> str:
    """The answer in a rendered chat, as a model would write it."""
    opened = _render(tokenizer, [_USER], tools=[_TOOL])
    if opened is not None and text.startswith(opened):
        answer = text[len(opened) :]
    else:
        answer = text.rpartition(QUESTION)[2]
        begin = answer.find(form.begin)
        answer = answer[begin:] if begin >= 0 else answer
    return answer.split(end_of_turn)[0] if end_of_turn else answer


def _check_reasoning(tokenizer: Tokenizer) -> Check:
    name, template = "reasoning", tokenizer.chat_template
    form = choose(template)
    if form is None and not _THINKING.search(template):
        return not_checked(name, "not supported: the chat template knows no thoughts.")
    if form is None:
        return differs(
            name,
            "the chat template knows thoughts, but marks them in no way that is known here: they "
            "stay text unless --reasoning-parser names one.",
        )
    opened = _render(tokenizer, [_USER])
    if opened is None:
        return differs(name, "the chat template refuses a chat of one question.")
    found = (
        ["an answer's thoughts begin in the prompt"] if opened.rstrip().endswith("<think>") else []
    )
    thought = {**_ASSISTANT, "reasoning_content": THOUGHT}
    earlier = _render(tokenizer, [_USER, thought, _USER])
    if earlier is None or ANSWER not in earlier:
        return differs(name, "the chat template refuses an earlier answer with reasoning_content.")
    found.append(f"earlier thoughts are {'shown' if THOUGHT in earlier else 'left out'}")
    if (read := _thoughts_of_last(tokenizer, form, thought)) not in (None, THOUGHT):
        return differs(name, f"thoughts as the template writes them are read as {read!r}.")
    if "enable_thinking" in template:
        off = _render(tokenizer, [_USER], enable_thinking=False)
        if off is None:
            return differs(name, "the chat template refuses enable_thinking=false.")
        found.append("enable_thinking turns them on and off")
    return ok(name, f"format {form.name}: {'; '.join(found)}.")


def _thoughts_of_last(
    tokenizer: Tokenizer, form: ReasoningFormat, thought: dict[str, Any]
) -> str | None:
    """What is read of a last answer's thoughts; None where the template does not show them."""
    text = _render(tokenizer, [_USER, thought], answer_follows=False) or ""
    answer = text.rpartition(QUESTION)[2]
    begins = [at for mark in form.begin if (at := answer.find(mark)) >= 0]
    if THOUGHT not in answer or not begins:
        return None
    return split(form, answer[min(begins) :]).reasoning
