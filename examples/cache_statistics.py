#!/usr/bin/env python
"""What the cache did for a few requests, and why it did not do more.

Three prompts begin alike and then go their own ways. The first finds nothing; the second finds the
KV of the shared part but no state where the two part, and leaves one there; the third skips up to
it.
"""

from __future__ import annotations

import sys

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.reference_model.chats import write_chat


def main() -> int:
    llm = LLM()
    shared = write_chat("shared", 6000).messages
    print("prompt  from cache  computed  matched, but computed again (by cause)")
    for name in ("Anna", "Boris", "Clara"):
        own = " ".join(message["content"] for message in write_chat(name, 1200).messages)
        question = f"My name is {name}. {own} What is my name?"
        before = llm.stats()["lost_tokens"]
        (output,) = llm.chat(
            [*shared, {"role": "user", "content": question}],
            SamplingParams(temperature=0.0, max_tokens=24),
        )
        after = llm.stats()["lost_tokens"]
        lost = {cause: n - before.get(cause, 0) for cause, n in after.items()}
        lost = {cause: n for cause, n in lost.items() if n}
        length, cached = len(output.prompt_token_ids), output.cached_tokens
        print(f"{length:6}  {cached:10}  {length - cached:8}  {lost or 'none'}")
    print()
    for key, value in llm.stats().items():
        print(f"{key:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
