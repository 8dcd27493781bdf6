#!/usr/bin/env python
"""What the cache did for a few requests, and why it did not do more.

Three prompts begin alike and then go their own ways, and nothing says where: they are plain token
ids, without the ends of their messages, and states at intervals are switched off. The first finds
nothing; the second finds the KV of the shared part but no state where the two part, and leaves one
there; the third skips up to it. As chats, the second one would skip already.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_hybrid import LLM, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))  # not in the wheel
from reference_model.chats import write_chat  # noqa: E402


def main() -> int:
    llm = LLM(inference_dynamic_batching_prefix_caching_checkpoint_interval=0)
    shared = write_chat("shared", 6000).messages
    print("prompt  from cache  computed  matched, but computed again (by cause)")
    for name in ("Anna", "Boris", "Clara"):
        own = " ".join(message["content"] for message in write_chat(name, 1200).messages)
        question = f"My name is {name}. {own} What is my name?"
        before = llm.stats()["lost_tokens"]
        prompt = llm.tokenizer.encode_chat([*shared, {"role": "user", "content": question}])
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24))
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
