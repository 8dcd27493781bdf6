"""How fast one request decodes and a prompt is computed, beside what the machine's memory and
products allow, which are measured too."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megatron_hybrid.llm import LLM
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.request import RequestOutput, SamplingParams
from megatron_hybrid.verify.dequantized import Weight
from megatron_hybrid.verify.report import Check, differs, not_checked, ok

PROMPT = 128  # tokens before the decode that is measured
BEFORE, MEASURED = 16, 64  # tokens: until everything is warm, and then
_EXPERT = re.compile(r"\.experts\.|block_sparse_moe\.(?:input|output)_linear")
CHUNK, CHUNK_ON_CPU = 4096, 512  # tokens of the prompt that is measured


class _GivenUpError(Exception):
    """Why the engine did not finish an answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one token takes at least: `bytes` of weights that are read for it, and in a prompt
    `numbers` that it is multiplied with. 0: nobody knows."""

    bytes: float
    numbers: float

    @classmethod
    def of(cls, weights: Iterable[Weight], model: HybridModelConfig, bits: int) -> Work:
        """`bits`: of a number that the checkpoint has not quantised."""
        moe, size, numbers = model.moe, 0.0, 0.0
        for weight in weights:
            is_expert = moe is not None and _EXPERT.search(weight.name)
            share = moe.experts_per_token / moe.num_experts if is_expert and moe else 1.0
            if "embed" in weight.name and not model.tie_word_embeddings:
                share = 0.0  # one row
            size += weight.numel * share * (weight.bits or bits) / 8
            if "embed" not in weight.name and "lm_head" not in weight.name:
                numbers += weight.numel * share
        return cls(size, numbers)


def measure(
    llm: LLM, work: Work, device: torch.device
) -> tuple[list[Check], dict[str, float | None]]:
    """Every rank makes this call."""
    engine, drawn = llm.engine, random.Random(11)
    longest = engine.max_seq_length
    if longest < PROMPT + BEFORE + MEASURED + 2:
        why = f"only {longest} tokens fit."
        return [not_checked("decode speed", why), not_checked("prefill speed", why)], {}

    def prompt(length: int) -> list[int]:
        return [drawn.randrange(engine.vocab_size // 2, engine.vocab_size) for _ in range(length)]

    try:
        decode = _decode(llm, prompt(PROMPT))
        wanted = CHUNK if device.type == "cuda" else CHUNK_ON_CPU
        chunk = min(wanted, engine.context.max_tokens, longest - 2)
        prefill = min(_prefill(llm, prompt(chunk)) for _ in range(3)) / chunk
    except _GivenUpError as error:
        return [differs("speed", f"the engine gave a request up: {error}")], {}
    read, products = _limits(device)
    ranks = llm.config.parallel_sizes.replica
    least_decode = work.bytes / read / ranks
    least_prefill = 2 * work.numbers / products / ranks
    figures = {
        "decode_tokens_per_second": 1 / decode,
        "decode_limit": 1 / least_decode if least_decode else None,
        "prefill_tokens_per_second": 1 / prefill,
        "prefill_limit": 1 / least_prefill if least_prefill else None,
        "prefill_tokens": chunk,
        "measured_bytes_per_second": read if math.isfinite(read) else None,
        "measured_operations_per_second": products if math.isfinite(products) else None,
        "bytes_for_a_token": work.bytes,
        "numbers_for_a_token": work.numbers,
    }
    return [
        ok("decode speed", _said(decode, least_decode, "reading the weights of a token once")),
        ok("prefill speed", _said(prefill, least_prefill, "the speed of a large product")),
    ], figures


def _said(seconds: float, least: float, what: str) -> str:
    rate = f"{1 / seconds:,.0f} tokens a second"
    if not least:
        return f"{rate}."
    return f"{rate}, {least / seconds:.0%} of what {what} allows here ({1 / least:,.0f})."


def _decode(llm: LLM, prompt: list[int]) -> float:
    """Seconds a token, of one request."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=BEFORE + MEASURED + 1)
    start, at = 0.0, 0
    for output in llm.stream(prompt, params):
        _check(output)
        count = len(output.token_ids)
        if count >= BEFORE and not at:
            start, at = time.perf_counter(), count
    return (time.perf_counter() - start) / (len(output.token_ids) - at)


def _prefill(llm: LLM, prompt: list[int]) -> float:
    """Seconds until the first token."""
    llm.engine.reset()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params, progress=False)
    _check(output)
    return time.perf_counter() - start


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise _GivenUpError(output.error)


def _limits(device: torch.device) -> tuple[float, float]:
    """Bytes a second that a sum reads, and operations a second of a large product; infinite where
    the engine has left no memory to measure them in."""
    is_gpu = device.type == "cuda"
    numbers, size = (2**26, 4096) if is_gpu else (2**24, 1024)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    try:
        values = torch.ones(numbers, device=device)
        a = torch.randn(size, size, device=device, dtype=dtype)
        read = values.nbytes / _seconds(values.sum, device)
        return read, 2 * size**3 / _seconds(lambda: a @ a, device)
    except torch.OutOfMemoryError:
        return math.inf, math.inf


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    best, repeats = math.inf, 8
    for _ in range(3):
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
