"""What a model is asked: a few texts, as tokens. They leave no trace in the report."""

from __future__ import annotations

import random

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.llm import LLM

ANSWER = 16  # tokens
LONGEST, SHORTEST = 320, 8  # tokens of a prompt

_CHAT = [
    {"role": "user", "content": "Name three rivers of Europe, and one city on each of them."},
    {"role": "assistant", "content": "The Danube (Vienna), the Rhine (Basel), the Seine (Paris)."},
    {
        "role": "user",
        "content": "Which of the three is the longest, and into which sea does it run?",
    },
]
_PROSE = (
    "The harbour lies below the old town. In the morning the boats come back with the night's "
    "catch, and by nine o'clock the market on the quay is full of people who argue about prices. "
    "A narrow street leads up to the church, whose tower can be seen from far out at sea. When the "
    "wind blows from the north, the fishermen stay at home, mend their nets and tell stories of "
    "storms that were worse. The oldest of them, who has not been out for ten years, still knows "
    "the depth of the water at every rock between here and the island. "
)
_MIXED = (
    "def area(width: float, height: float) -> float:\n    return width * height\n\n"
    'table = {"a": 1.5, "b": [2, 3, 5, 7, 11], "c": None}\n'
    "12345 + 67890 = 80235; 3.14159; 0xdeadbeef; 2026-11-23T09:41:07Z\n"
    "Zażółć gęślą jaźń. 日本語の文章です。Быстрая лиса. Τι κάνεις; naïve café, 50 €.\n"
    "SELECT name, count(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;\n"
)


def make_prompts(llm: LLM) -> list[list[int]]:
    """Token ids that the model has, of lengths that end nowhere in particular: a chat, prose, code
    and numbers in several scripts, and random tokens. Raises ConfigurationError where next to
    nothing fits."""
    vocabulary = llm.engine.vocab_size
    longest = min(LONGEST, llm.engine.max_seq_length - ANSWER - 2)
    if longest < SHORTEST:
        raise ConfigurationError(
            f"{llm.engine.max_seq_length} tokens fit ({llm.engine.max_seq_length_flag}); at least "
            f"{SHORTEST + ANSWER + 2} are needed."
        )
    drawn = random.Random(7)
    first = min(16, vocabulary // 2)  # special tokens often come first
    prompts = [[drawn.randrange(first, vocabulary) for _ in range(173)]]
    try:
        tokenizer = llm.tokenizer
    except ConfigurationError:  # then random tokens have to do
        prompts += [[drawn.randrange(first, vocabulary) for _ in range(n)] for n in (61, 307)]
    else:
        prompts += [tokenizer.encode(_MIXED), tokenizer.encode(_PROSE * 2)]
        if tokenizer.has_chat_template:
            try:
                prompts.append(tokenizer.encode_chat(_CHAT))
            except InvalidRequestError:
                prompts.append(tokenizer.encode(_CHAT[0]["content"]))
    known = ([one for one in prompt if one < vocabulary] for prompt in prompts)
    return [prompt[:longest] for prompt in known if prompt]
