#!/usr/bin/env python
"""What drafts gain where they hold, and cost where they do not, against an engine without them.

    python tools/benchmark_drafts.py --config configs/nemotron-h-8b.yaml \\
        --num-speculative-tokens 4 decode_1 decode_8 decode_32 decode_128 decode_256

`decode_N`: N requests of 1,024 random tokens that decode greedily. Embedding and head are changed
so that answers repeat themselves every 16 tokens. Four ways:

    plain     an engine without drafts, before and after the others
    right     drafts that hold: from the answers, or with --drafter heads from the model's head,
              which is changed as well
    half      the same, but each of them is wrong with probability one half
    wrong     drafts that are tokens at random, or from a head that knows nothing

--drafter auto is prompt_lookup here. Tokens a second are counted from the step on in which all
requests decode. All engines share the weights; give --inference-dynamic-batching-buffer-size-gb and
--inference-dynamic-batching-prefix-caching-mamba-gb, so that each has the same room.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import numpy as np
import torch

from megatron_hybrid import SamplingParams
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.speculation import Drafter, Ints, Tokens
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.models.hybrid_model import HybridModel

PROMPT = 1024  # tokens
PERIOD = 16  # tokens after which answers repeat themselves
PLACES = 4093  # of a text, after which the same ones are guessed wrongly again: not after a period
WAYS = {"right": 1.0, "half": 0.5, "wrong": 0.0}  # how likely a draft holds


class SomeWrong:
    """A drafter's guesses, of which some are replaced by tokens at random: the same ones, whenever
    a place is guessed."""

    def __init__(self, drafter: Drafter, right: float, rows: int, vocab_size: int) -> None:
        """right: how likely a guess stays what it is."""
        self._drafter = drafter
        self._lengths = np.zeros(rows, dtype=np.int64)  # of the texts
        random = np.random.default_rng(0)
        self._random = random.integers(0, vocab_size, size=(rows, PLACES))
        self._is_wrong = random.random((rows, PLACES)) >= right

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        self._lengths[row] = len(text)
        self._drafter.begin(row, text, cache_salt)

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        self._lengths[rows] += counts
        self._drafter.extend(rows, tokens, counts)

    def guess(self, rows: Ints, width: int) -> Ints:
        places = (self._lengths[rows, None] + np.arange(width)) % PLACES
        wrong, others = self._is_wrong[rows[:, None], places], self._random[rows[:, None], places]
        return np.where(wrong, others, self._drafter.guess(rows, width))


@torch.no_grad()
def make_answers_repeat(model: HybridModel) -> None:
    """After token t comes t + 1, and after the last of each PERIOD tokens the first of them; where
    embedding and head are one, the other one of a pair, 2 k and 2 k + 1. All layers compute what
    they did, but an embedding so much larger than what they add decides alone."""
    assert model.embedding is not None and isinstance(model.final_norm, RMSNorm)
    embedding = model.embedding.weight
    embedding.mul_(64 / embedding.float().std())
    if model.lm_head is None:
        # The tokens of a pair differ in the sign of half their numbers, which the norm turns round.
        # (A token must not repeat itself: where a guess for a token in flight was wrong, the device
        # puts the row's own in the drafts' places, which would hold.)
        half = embedding.shape[1] // 2
        odd = embedding[1::2]
        odd.copy_(embedding[::2][: len(odd)])
        odd[:, half:].neg_()
        model.final_norm.weight.abs_()[half:].neg_()
    else:
        tokens = torch.arange(len(embedding), device=embedding.device)
        last = (tokens + PERIOD - 1).clamp(max=len(embedding) - 1)
        before = torch.where(tokens % PERIOD == 0, last, tokens - 1)
        head = model.lm_head.row_range(0, model.lm_head.outputs)
        assert isinstance(head, torch.Tensor)
        head.copy_(embedding[before] * (head.float().std() / embedding.float().std()))


@torch.no_grad()
def make_head_guess(model: HybridModel, way: str) -> None:
    """What the embedding of a token says of the next one; or something else, the same for all; or
    that where the embedding lies on one side of a plane through zero, so for half of the tokens."""
    assert model.mtp is not None and model.embedding is not None
    joint = model.mtp.fc
    joint.zero_()
    if way == "wrong":
        joint[0].fill_(64)
        return
    width = len(joint)
    joint[:, :width].fill_diagonal_(64)
    if way == "half":
        embedding = model.embedding.weight[: 64 * PERIOD].float()
        embedding = embedding / embedding.square().mean(1, keepdim=True).sqrt()
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(width, generator=generator).to(embedding.device)
        side = embedding @ normal
        # On one side far more of this token than of the right one. Less of it, on the other side,
        # is in favour of no token.
        other = embedding[0].outer(normal * (5 * 64 / side.abs().median()))
        joint[:, :width] += other.to(joint.dtype)


def rate(engine: DynamicInferenceEngine, count: int, tokens: int, prompt: int) -> float:
    """Tokens a second of so many requests, over so many tokens of each."""
    random = np.random.default_rng(0)
    # some get ahead of others; nobody shall end before all have come far enough
    params = SamplingParams(temperature=0.0, max_tokens=8 * tokens, ignore_eos=True)
    for number in range(count):
        text = random.integers(16, engine.vocab_size, size=prompt).tolist()
        engine.add_request(str(number), text, params)
    while engine.stats()["last_step"]["decode_tokens"] < count:
        engine.step()
    for _ in range(16):
        engine.step()
    written, start = 0, time.perf_counter()
    while written < count * tokens:
        written += sum(len(event.token_ids) for event in engine.step())
    seconds = time.perf_counter() - start
    for number in range(count):
        engine.abort(str(number))
    while engine.has_work():
        engine.step()
    engine.reset()
    return written / seconds


class Ways:
    """Engines, one after the other, on the same weights."""

    def __init__(self, config: EngineConfig, loads: list[int], tokens: int, prompt: int) -> None:
        self._config = config
        self._loads = loads
        self._length = tokens, prompt
        self._model: HybridModel = load_weights(config)
        make_answers_repeat(self._model)

    def measure(self, drafts: int, way: str = "right") -> list[float]:
        """Tokens a second of each load. way: of WAYS, how the drafts are."""
        config = self._config.replace(num_speculative_tokens=drafts)
        engine = build_engine(config, model=self._model)
        speculation = engine.scheduler.decodes.speculation
        drafter = None if speculation is None else speculation.drafter
        if speculation is not None and drafter is None:
            make_head_guess(self._model, way)
        elif speculation is not None and drafter is not None and way != "right":
            rows = len(engine.context.rows.decoding)
            speculation.drafter = SomeWrong(drafter, WAYS[way], rows, engine.vocab_size)
        found = []
        for count in self._loads:
            rate(engine, count, 16, self._length[1])  # compiles what is not compiled yet
            before = engine.stats()
            found.append(rate(engine, count, *self._length))
            if drafts:
                print(f"  {way}, decode_{count}: {_drafted(before, engine.stats())}", flush=True)
        del engine
        gc.collect()  # of what refers to itself, so that the next one finds the same room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found


def _drafted(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What was drafted between two looks at the engine's statistics."""
    names = ("steps", "draft_tokens", "accepted_tokens")
    steps, drafted, held = (after[name] - before[name] for name in names)
    return f"{drafted} drafts in {steps} steps, {held / max(drafted, 1):.1%} held"


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="+", metavar="LOAD", help="decode_N")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens (default: {PROMPT})")
    add_engine_arguments(parser)
    args = parser.parse_args()
    loads = []
    for name in args.loads:
        if not name.removeprefix("decode_").isdigit():
            parser.error(f"{name!r} is not decode_N, with a number N.")
        loads.append(int(name.removeprefix("decode_")))
    if not args.num_speculative_tokens:
        parser.error("--num-speculative-tokens is 0; it must be at least 1.")
    try:
        config = engine_config_from_args(args)
        if config.drafter == "auto":
            config = config.replace(drafter="prompt_lookup")
        ways = Ways(config, loads, args.tokens, args.prompt)
        drafts = args.num_speculative_tokens
        before = ways.measure(0)
        found = {way: ways.measure(drafts, way) for way in WAYS}
        after = ways.measure(0)
    except ConfigurationError as error:
        print(f"benchmark_drafts.py: {error}", file=sys.stderr)
        return 2
    print(f"| load | plain, tokens a second | {' | '.join(WAYS)} |\n|---|---{'|---' * len(WAYS)}|")
    for index, count in enumerate(loads):
        plain = (before[index] + after[index]) / 2
        cells = [f"{rates[index]:.0f} ({rates[index] / plain:.3f})" for rates in found.values()]
        print(f"| decode_{count} | {before[index]:.0f}, {after[index]:.0f} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
