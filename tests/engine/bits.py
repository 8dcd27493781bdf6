"""Answers of tiny models in batch-invariant mode, and whether others have the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from tests.tiny_models import make_tiny_model

BLOCK = GRANULE = 16
OPTIONS: dict[str, Any] = {
    "batch_invariant": True,
    "inference_dynamic_batching_block_size": BLOCK,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 40,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.02,
}
BLOCK_SIZE = "inference_dynamic_batching_block_size"
CACHING = "inference_dynamic_batching_prefix_caching"
EXACT_ENDS = "inference_dynamic_batching_prefix_caching_exact_ends"
INTERVAL = "inference_dynamic_batching_prefix_caching_checkpoint_interval"
POLICY = "inference_dynamic_batching_prefix_caching_eviction_policy"
TOKENS = "inference_dynamic_batching_max_tokens"
REQUESTS = "inference_dynamic_batching_max_requests"
BUFFER = "inference_dynamic_batching_buffer_size_gb"
STATES = "inference_dynamic_batching_prefix_caching_mamba_gb"
WRITES = "mamba_inference_state_write_interval"
DRAFTS = "num_speculative_tokens"
MODE = "prefill_checkpoint_mode"
ANSWER = 21
LENGTHS = (1, 2, 13, 15, 16, 17, 31, 32, 33, 47, 50, 64, 70)

Prompt = list[int]
# Tokens, and the log-probability of each and of the two likeliest ones.
Bits = tuple[list[int], list[tuple[float, ...]]]


def params(seed: int | None = None, tokens: int = ANSWER, **others: Any) -> SamplingParams:
    """Greedy, or drawn with a seed."""
    given = {"temperature": 0.0 if seed is None else 0.9, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(seed=seed, max_tokens=tokens, **(given | others))


def bits_of(output: Any) -> Bits:
    """Of one completion."""
    found = []
    for entry in output.logprobs:
        found.append((entry.logprob, *(value for _, value in entry.top)))
    return list(output.token_ids), found


def difference(found: Bits, alone: Bits) -> str | None:
    """The first one; None: they have the same bits."""
    for place, (own, other) in enumerate(zip(found[1], alone[1], strict=False)):
        if own != other:
            return f"token {place}: {own}, alone {other}"
    return None if found == alone else f"{found[0]}, alone {alone[0]}"


@dataclass
class Known:
    """A tiny model, prompts, and the bits of their answers, each computed alone and without a
    cache."""

    folder: Path
    prompts: list[Prompt]
    text: Prompt  # other tokens
    answers: dict[tuple[Any, ...], list[Bits]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    built: dict[str, LLM] = field(default_factory=dict)
    asynchronous: bool | None = None  # None: as engines are built

    @classmethod
    def of(cls, family: str, folder: Path, seed: int = 0, **overrides: Any) -> Known:
        make_tiny_model(family, folder, seed=seed, **overrides)
        return cls.at(folder)

    @classmethod
    def at(cls, folder: Path, lengths: Sequence[int] = LENGTHS, **options: Any) -> Known:
        pick = np.random.default_rng(3)
        text = pick.integers(1, 160, size=sum(lengths)).tolist()
        starts = np.cumsum((0, *lengths))
        prompts = [text[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        return cls(folder, prompts, pick.integers(1, 160, size=1000).tolist(), options=options)

    def llm(self, **options: Any) -> LLM:
        """An engine with nothing in its cache; the same options give the same one."""
        key = repr((sorted(options.items()), self.asynchronous))
        if key not in self.built:
            llm = LLM(str(self.folder), **(OPTIONS | self.options | options))
            if self.asynchronous is not None:
                llm.engine.runner.asynchronous = self.asynchronous
            self.built[key] = llm
        llm = self.built[key]
        llm.engine.reset()
        return llm

    def small(self, blocks: int = 11, states: int = 4, requests: int = 6, **options: Any) -> LLM:
        """An engine in which requests preempt each other, and states are evicted."""
        geometry = self.llm(**options).engine.context.geometry
        live = requests * geometry.bytes_per_slot
        extra = options.get(DRAFTS, 0)
        rings = 0
        if geometry.has_recurrent:
            rings = self._bytes_of_rings(self.llm(**options), requests)
        size = blocks * geometry.bytes_per_block + live + rings + extra
        few: dict[str, Any] = {}
        if geometry.has_window:  # whose blocks a step's prompts need beside those of each request
            few[TOKENS] = 64
            of_windows = requests * geometry.window_quota + 64 // geometry.block_size + 2
            size += of_windows * geometry.bytes_per_window_block
        return self.llm(
            **options
            | few
            | {
                REQUESTS: requests,
                BUFFER: (size + 1) / GIB,
                STATES: (states * geometry.bytes_per_cached_slot + 1) / GIB,
            }
        )

    @staticmethod
    def _bytes_of_rings(llm: LLM, requests: int) -> int:
        rings = llm.engine.runner._caches.rings.values()
        tensors = [t for ring in rings for t in (ring.conv, *(ring.inputs or ())) if t is not None]
        return sum(t[0].numel() * t.element_size() for t in tensors) * requests

    def learn(self, prompts: Sequence[Prompt], wanted: SamplingParams) -> None:
        new = {tuple(p) for p in prompts if (tuple(p), repr(wanted)) not in self.answers}
        if not new:
            return
        asynchronous, self.asynchronous = self.asynchronous, None
        alone = self.llm(**{CACHING: False, REQUESTS: 1})
        self.asynchronous = asynchronous
        for prompt in new:
            (output,) = alone.generate([list(prompt)], wanted, progress=False)
            assert output.error is None, output.error
            found = [bits_of(choice) for choice in output.choices or [output]]
            self.answers[prompt, repr(wanted)] = found

    def alone(self, prompt: Prompt, wanted: SamplingParams) -> Bits:
        self.learn([prompt], wanted)
        return self.answers[tuple(prompt), repr(wanted)][0]

    def differing(self, outputs: Sequence[RequestOutput], wanted: SamplingParams) -> Iterator[str]:
        """What is not as when it was alone."""
        self.learn([output.prompt_token_ids for output in outputs], wanted)
        for output in outputs:
            known = self.answers[tuple(output.prompt_token_ids), repr(wanted)]
            choices = output.choices or [output]
            assert len(choices) == len(known) and output.error is None, output.error
            for choice, alone in zip(choices, known, strict=True):
                if (words := difference(bits_of(choice), alone)) is not None:
                    yield f"prompt of {len(output.prompt_token_ids)}, {choice.index}, {words}"

    def check(self, outputs: Sequence[RequestOutput], wanted: SamplingParams) -> None:
        found = list(self.differing(outputs, wanted))
        assert not found, "\n".join(found)

    def generate(
        self, llm: LLM, prompts: Sequence[Prompt], wanted: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Compared with each alone."""
        outputs = llm.generate(list(prompts), wanted, progress=False, **options)
        self.check(outputs, wanted)
        llm.engine.check_integrity()
        return outputs
