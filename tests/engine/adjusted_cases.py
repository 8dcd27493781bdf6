"""Parameters with penalties, biases, min_tokens, grammars and budgets of thoughts: apart from their
tests, for ranks that need not import what these do."""

from __future__ import annotations

import json
from dataclasses import replace

from megatron_hybrid import SamplingParams
from megatron_hybrid.request import Grammar, ThinkingBudget

OPTIONS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.05,
    "inference_dynamic_batching_max_requests": 12,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.05,
    "device": "cpu",
}
CHAT = [{"role": "user", "content": "Tell me about the lighthouse keeper, please."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(PERSON))
WORDS = Grammar("regex", "([a-z]{1,8} ){3}[a-z]{1,8}")
A, DOT = 72, 21  # of the shipped tokenizer
CLOSE = (35, 22, 446, 677, 37)  # "</think>", of which each token has a step
THOUGHTS = ThinkingBudget(3, ("<think>",), ("</think>",), CLOSE, opened=True)
# Begun by the model, with what its answers to CHAT begin with.
OWN_THOUGHTS = replace(THOUGHTS, begin=("I don't",), opened=False)
AFTER_THOUGHTS = Grammar(
    "lark", f'start: thoughts held\nthoughts[lazy]: /(.|\\n)*/ "</think>"\nheld: /{WORDS.text}/\n'
)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **options})  # type: ignore[arg-type]


def drawn(**options: object) -> SamplingParams:
    """Sampled with a seed of which every drawn point lies at least 5e-4 from where one token's
    share ends and the next one's begins: batches of other sizes round probabilities otherwise."""
    return greedy(**{"temperature": 0.9, "seed": 51, **options})


CASES = {
    "plain": greedy(),
    "repetition": greedy(repetition_penalty=1.5),
    "frequency": drawn(frequency_penalty=1.2, presence_penalty=-0.3),
    "penalties": drawn(repetition_penalty=1.2, presence_penalty=1.0, top_p=0.9),
    "bias": drawn(logit_bias=((A, 3.0), (DOT, -100.0)), top_k=20),
    "min_tokens": greedy(min_tokens=15),
    "bad_words": greedy(bad_words=("don't know", "lighthouse"), max_tokens=30),
    "allowed": drawn(allowed_token_ids=range(60, 90), min_tokens=3),
    "json": greedy(grammar=JSON, max_tokens=60),
    "thoughts": greedy(thinking_token_budget=THOUGHTS),
    "own_thoughts": greedy(thinking_token_budget=OWN_THOUGHTS, presence_penalty=0.5),
    "words_after_thoughts": drawn(
        thinking_token_budget=replace(THOUGHTS, tokens=7), grammar=AFTER_THOUGHTS, max_tokens=60
    ),
    "words": drawn(grammar=WORDS, presence_penalty=0.5, max_tokens=60),
    "everything": drawn(
        grammar=WORDS, repetition_penalty=1.1, logit_bias=((A, 2.0),), min_tokens=12, top_k=50
    ),
}
