#!/usr/bin/env python
"""What drafts gain where they hold, and cost where they never do, against an engine without them.

    python tools/benchmark_drafts.py --config configs/nemotron-h-8b.yaml \\
        --num-speculative-tokens 4 decode_1 decode_32

`decode_N`: N requests of 1,024 random tokens that decode greedily. Embedding and head are changed
so that answers repeat themselves every 16 tokens. Three ways:

    plain     an engine without drafts, before and after the others
    right     drafts that hold: from the answers, or with --drafter heads from the model's head,
              which is changed as well
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
from megatron_hybrid.engine.speculation import Ints, Tokens
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.hybrid_model import HybridModel

PROMPT = 1024  # tokens
PERIOD = 16  # tokens after which answers repeat themselves


class WrongGuesses:
    """A drafter that knows nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        pass

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        pass

    def guess(self, rows: Ints, width: int) -> Ints:
        return self._random.integers(0, self._vocab_size, size=(len(rows), width))


@torch.no_grad()
def make_answers_repeat(model: HybridModel) -> None:
    """After token t comes t + 1, and after the last of each PERIOD tokens the first of them; where
    embedding and head are one, t itself. All layers compute what they did, but an embedding so
    much larger than what they add decides alone."""
    assert model.embedding is not None
    embedding = model.embedding.weight
    embedding.mul_(64 / embedding.float().std())
    if model.lm_head is not None:
        tokens = torch.arange(len(embedding), device=embedding.device)
        last = (tokens + PERIOD - 1).clamp(max=len(embedding) - 1)
        before = torch.where(tokens % PERIOD == 0, last, tokens - 1)
        head = model.lm_head.row_range(0, model.lm_head.outputs)
        assert isinstance(head, torch.Tensor)
        head.copy_(embedding[before] * (head.float().std() / embedding.float().std()))


@torch.no_grad()
def make_head_guess(model: HybridModel, right: bool) -> None:
    """What the embedding of a token says of the next one, or something else: the same for all."""
    assert model.mtp is not None
    joint = model.mtp.fc
    joint.zero_()
    if right:
        joint[:, : len(joint)].fill_diagonal_(64)
    else:
        joint[0].fill_(64)


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

    def measure(self, drafts: int, wrong: bool = False) -> list[float]:
        """Tokens a second of each load. `wrong`: guesses are."""
        config = self._config.replace(num_speculative_tokens=drafts)
        engine = build_engine(config, model=self._model)
        speculation = engine.scheduler.decodes.speculation
        if speculation is not None and speculation.drafter is None:
            make_head_guess(self._model, right=not wrong)
        elif speculation is not None and wrong:
            speculation.drafter = WrongGuesses(engine.vocab_size)
        found = []
        for count in self._loads:
            rate(engine, count, 16, self._length[1])  # compiles what is not compiled yet
            found.append(rate(engine, count, *self._length))
            stats = engine.stats()
            if drafts:
                share = stats["accepted_tokens"] / max(stats["draft_tokens"], 1)
                print(f"  decode_{count}: {stats['draft_tokens']} drafted, {share:.1%} held")
        del engine
        gc.collect()  # of what refers to itself, so that the next one finds the same room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found


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
        right, wrong = ways.measure(drafts), ways.measure(drafts, wrong=True)
        after = ways.measure(0)
    except ConfigurationError as error:
        print(f"benchmark_drafts.py: {error}", file=sys.stderr)
        return 2
    print("| load | plain, tokens a second | right | wrong |\n|---|---|---|---|")
    for index, count in enumerate(loads):
        plain = (before[index] + after[index]) / 2
        print(
            f"| decode_{count} | {before[index]:.0f}, {after[index]:.0f} "
            f"| {right[index]:.0f} ({right[index] / plain:.2f}) "
            f"| {wrong[index]:.0f} ({wrong[index] / plain:.2f}) |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
