#!/usr/bin/env python
"""Several samples of one long prompt: the shared part is computed once.

The first sample leaves its KV blocks and a recurrent state behind; all the others start from
there. The same seed gives the same sample, whatever else is in the batch.
"""

from __future__ import annotations

import sys

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.reference_model.chats import write_chat

SAMPLES = 8


def main() -> int:
    llm = LLM()
    chats = (write_chat(n, 4000, split="held_out", open_questions=1) for n in range(100))
    chat = next(chat for chat in chats if chat.open_questions)
    messages = chat.prompt(chat.open_questions[0])
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=seed)
        for seed in range(SAMPLES)
    ]
    outputs = llm.chat([messages], params[:1])
    outputs += llm.chat([messages] * (SAMPLES - 1), params[1:])
    print(f"question: {chat.open_questions[0].text}")
    for seed, output in enumerate(outputs):
        cached, length = output.cached_tokens, len(output.prompt_token_ids)
        print(f"seed {seed}: {output.text}   ({cached} of {length} prompt tokens from the cache)")
    stats = llm.stats()
    print(f"computed {stats['computed_tokens']} prompt tokens, skipped {stats['skipped_tokens']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
