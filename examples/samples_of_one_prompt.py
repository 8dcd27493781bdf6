#!/usr/bin/env python
"""Several samples of one long prompt: the prompt is computed once.

`n` asks for all of them in one request. The state at the prompt's end is kept, and every sample
but the first starts there. Sample i draws from its own stream of the seed, so that the same seed
gives the same samples, whatever else is in the batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_hybrid import LLM, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))  # not in the wheel
from reference_model.chats import write_chat  # noqa: E402

SAMPLES = 8


def main() -> int:
    llm = LLM()
    chats = (write_chat(n, 4000, split="held_out", open_questions=1) for n in range(100))
    chat = next(chat for chat in chats if chat.open_questions)
    params = SamplingParams(n=SAMPLES, temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    (output,) = llm.chat(chat.prompt(chat.open_questions[0]), params, progress=False)
    print(f"question: {chat.open_questions[0].text}")
    length = len(output.prompt_token_ids)
    for sample in output.choices:
        cached = sample.cached_tokens
        print(
            f"sample {sample.index}: {sample.text}   "
            f"({cached} of {length} prompt tokens from the cache)"
        )
    stats = llm.stats()
    print(f"computed {stats['computed_tokens']} prompt tokens, skipped {stats['skipped_tokens']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
