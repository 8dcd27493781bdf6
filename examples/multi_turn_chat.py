#!/usr/bin/env python
"""What prefix caching does for a chat: the second turn skips what the first one computed.

    python examples/multi_turn_chat.py
    python examples/multi_turn_chat.py --load DIR --prompt-tokens 12000

A long chat asks a question, gets its answer, and asks another one. The second turn's time to
first token is measured with the cache that the first turn left, and on an empty cache. Exits with
1 if the second turn skipped another number of tokens than it should.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megatron_hybrid import LLM, ConfigurationError, SamplingParams
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))  # not in the wheel
from reference_model.chats import Chat, write_chat  # noqa: E402

Message = dict[str, str]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


class Turn(NamedTuple):
    text: str
    prompt: list[int]
    answer: list[int]
    cached_tokens: int
    seconds_to_first_token: float


def ask(llm: LLM, messages: list[Message]) -> Turn:
    start = time.perf_counter()
    outputs = llm.stream(messages, GREEDY)
    output = next(outputs)
    first = time.perf_counter() - start
    if output.finish_reason is None:
        output = deque(outputs, maxlen=1).pop()
    prompt, answer = output.prompt_token_ids, output.token_ids
    return Turn(output.text, prompt, answer, output.cached_tokens, first)


def expected_skip(llm: LLM, first: Turn, second: Turn) -> int:
    """Where the first turn left its last state that the second one can use."""
    computed = (first.prompt + first.answer)[:-1]  # no step fed the last token
    if second.prompt[: len(computed)] != computed:  # a tokenizer may read its own answer otherwise
        computed = first.prompt
    if llm.config.inference_dynamic_batching_prefix_caching_exact_ends:
        return len(computed)
    return llm.engine.context.geometry.floor_grid(len(computed))


def long_chat(llm: LLM, tokens: int) -> Chat:
    """A chat that states facts, with two questions left to ask; about `tokens` tokens long."""
    characters = 4 * tokens
    for seed in range(100):
        chat = write_chat(seed, characters, split="held_out", open_questions=2)
        if len(chat.open_questions) < 2:
            continue
        length = len(llm.tokenizer.encode_chat(chat.prompt(chat.open_questions[0])))
        if abs(length - tokens) < 0.05 * tokens:
            return chat
        # How many characters a token has depends on the tokenizer.
        characters = round(characters * tokens / length)
    raise RuntimeError(f"Found no chat of about {tokens} tokens.")


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=3000, help="length of the first prompt, about"
    )
    parser.add_argument("--repeats", type=int, default=5, help="times to measure; medians count")
    add_engine_arguments(parser)
    args = parser.parse_args()
    if args.prompt_tokens < 100 or args.repeats < 1:
        parser.error("--prompt-tokens must be at least 100 and --repeats at least 1.")
    try:
        llm = LLM(config=engine_config_from_args(args))
    except ConfigurationError as error:
        parser.error(str(error))

    chat = long_chat(llm, args.prompt_tokens)
    question, follow_up = chat.open_questions[:2]
    first_messages = chat.prompt(question)
    ask(llm, first_messages)  # the very first steps of a process are slower

    warm: list[float] = []
    cold: list[float] = []
    for _ in tqdm(range(args.repeats), "measuring", leave=False):
        llm.engine.reset_prefix_cache()
        first = ask(llm, first_messages)
        second_messages = [
            *first_messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": follow_up.text},
        ]
        second = ask(llm, second_messages)
        warm.append(second.seconds_to_first_token)
        llm.engine.reset_prefix_cache()
        again = ask(llm, second_messages)
        cold.append(again.seconds_to_first_token)

    expected = expected_skip(llm, first, second)
    ratio = statistics.median(cold) / statistics.median(warm)
    print(f"user:      {question.text}")
    print(f"assistant: {first.text}   (expected: {question.expected})")
    print(f"user:      {follow_up.text}")
    print(f"assistant: {second.text}   (expected: {follow_up.expected})")
    print()
    print(f"first turn:   {len(first.prompt)} prompt tokens, {first.cached_tokens} from the cache")
    print(
        f"second turn:  {len(second.prompt)} prompt tokens, {second.cached_tokens} from the cache;"
        f" expected {expected}"
    )
    print(
        f"time to first token of the second turn: {1e3 * statistics.median(warm):.1f} ms, on an"
        f" empty cache {1e3 * statistics.median(cold):.1f} ms: {ratio:.1f} times shorter"
        f" (medians of {args.repeats})"
    )
    same = "yes" if again.text == second.text else "NO"
    print(f"the same answer with and without the cache: {same}")
    if second.cached_tokens != expected or again.cached_tokens != 0:
        print("The number of skipped tokens is not what it should be.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
