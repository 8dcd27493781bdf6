#!/usr/bin/env python
"""Rollouts between steps of a trainer: generate, change the weights in place, generate again.

The "trainer" here only adds noise to the reference model's weights. New weights come as tensors by
Hugging Face's names, or as a folder. After them nothing of the old ones is in the prefix cache: the
first rollout computes its whole prompt, the other samples of it skip it again. Exits with 1 if the
first weights, put back, do not give the first answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_hybrid import LLM, SamplingParams, reference_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))  # not in the wheel
from reference_model.chats import write_chat  # noqa: E402

ROLLOUTS = 4


def main() -> int:
    folder = reference_model.path()
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    llm = LLM()
    prompt = llm.tokenizer.encode_chat(write_chat("rollout", 1500).messages)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16, n=ROLLOUTS)

    def roll_out() -> list[list[int]]:
        (output,) = llm.generate(prompt, params)
        cached = [choice.cached_tokens for choice in output.choices]
        print(f"epoch {llm.stats()['epoch']}: {len(prompt)} prompt tokens, from cache {cached}")
        print(f"  {output.text!r}")
        return [choice.token_ids for choice in output.choices]

    first = roll_out()
    for _ in range(2):
        for weight in weights.values():
            noise = torch.randn(weight.shape, generator=generator)
            weight += (0.02 * noise * weight.float().abs().mean()).to(weight.dtype)
        llm.update_weights(weights)
        roll_out()
    llm.update_weights(folder)
    return int(roll_out() != first)


if __name__ == "__main__":
    sys.exit(main())
