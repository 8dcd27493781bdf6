#!/usr/bin/env python
"""What the cache did for a few requests, and why it did not do more.

Three prompts share a long beginning. The first finds nothing; the second finds the KV of the
shared part but no state where the two part, and leaves one there; the third skips up to it.
"""

from __future__ import annotations

import sys

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.reference_model.chats import write_chat


def main() -> int:
    llm = LLM()
    chats = (write_chat(n, 6000, split="held_out", open_questions=3) for n in range(100))
    chat = next(chat for chat in chats if len(chat.open_questions) >= 3)
    print("prompt  from cache  computed  matched, but computed again (by cause)")
    for question in chat.open_questions[:3]:
        before = llm.stats()
        (output,) = llm.chat(chat.prompt(question), SamplingParams(temperature=0.0, max_tokens=24))
        lost = {
            cause: count - before["lost_tokens"].get(cause, 0)
            for cause, count in llm.stats()["lost_tokens"].items()
            if count != before["lost_tokens"].get(cause, 0)
        }
        length, cached = len(output.prompt_token_ids), output.cached_tokens
        print(f"{length:6}  {cached:10}  {length - cached:8}  {lost or 'none'}")
    print()
    for name, value in llm.stats().items():
        print(f"{name:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
