#!/usr/bin/env python
"""What adapters cost: steps of requests that all have one, of requests with several, and of none.

    python tools/benchmark_lora.py --config configs/nemotron-h-8b.yaml --load-format dummy \\
        --max-loras 8 --max-lora-rank 16 --json out.json decode_1 decode_32 prompts_8

`decode_N`: N requests of --prompt random tokens that decode greedily, milliseconds a step;
`prompts_N`: N prompts of that length whose first tokens come, milliseconds in all. Three ways, in
turn, --repeats times, and the median of each:

    none      no request has an adapter
    one       all have the same one
    several   the i-th has the i-th of --max-loras

The adapters are random ones of all linear layers, with --enable-lora --lora-experts also of
experts. Before that an engine without --enable-lora is
measured (`without`), unless --no-without.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import numpy as np

from bench.adapters import random_adapter
from megatron_hybrid import SamplingParams
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine

WARM_UP_STEPS = 16


class Measured:
    """An engine, and the adapters that its requests may have."""

    def __init__(self, engine: DynamicInferenceEngine, steps: int, prompt: int) -> None:
        self._engine, self._steps, self._prompt = engine, steps, prompt
        self._requests = 0

    def milliseconds(self, load: str, way: str) -> float:
        """Of a step, or of all prompts."""
        kind, _, count = load.partition("_")
        names = [self._adapter(way, i) for i in range(int(count))]
        return self._decodes(names) if kind == "decode" else self._prompts(names)

    def _adapter(self, way: str, number: int) -> str:
        known = self._engine.adapters
        if way in ("none", "without"):
            return ""
        return known[number % len(known) if way == "several" else 0]

    def _decodes(self, names: list[str]) -> float:
        engine = self._engine
        self._add(names, 4 * self._steps + 8 * WARM_UP_STEPS + 64 * len(names))
        while engine.stats()["last_step"]["decode_tokens"] < len(names):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        start = time.perf_counter()
        for _ in range(self._steps):
            engine.step()
        seconds = time.perf_counter() - start
        self._end()
        return 1e3 * seconds / self._steps

    def _prompts(self, names: list[str]) -> float:
        engine, left = self._engine, len(names)
        start = time.perf_counter()
        self._add(names, 1)
        while left:
            left -= sum(event.finish_reason is not None for event in engine.step())
        seconds = time.perf_counter() - start
        self._end()
        return 1e3 * seconds

    def _add(self, names: list[str], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for name in names:
            self._requests += 1
            random = np.random.default_rng(self._requests)
            text = random.integers(16, self._engine.vocab_size, size=self._prompt).tolist()
            self._engine.add_request(str(self._requests), text, params, adapter=name)

    def _end(self) -> None:
        for number in range(self._requests + 1):
            self._engine.abort(str(number))
        while self._engine.has_work():
            self._engine.step()
        self._engine.reset()


def measure(measured: Measured, load: str, ways: list[str], repeats: int) -> dict[str, float]:
    """The median milliseconds of each way; the first round is left out."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:
            found[way].append(measured.milliseconds(load, way))
    return {way: statistics.median(values[1:]) for way, values in found.items()}


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="+", metavar="decode_N|prompts_N")
    parser.add_argument("--steps", type=int, default=100, help="steps of decodes (default: 100)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens (default: 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--without", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here, too")
    add_engine_arguments(parser)
    args = parser.parse_args()
    config = engine_config_from_args(args).replace(enable_lora=True)
    found: dict[str, dict[str, float]] = {load: {} for load in args.loads}
    for enabled in (False, True) if args.without else (True,):
        own = config if enabled else config.replace(enable_lora=False, lora_experts=False)
        engine = build_engine(own)
        ways = ["none", "one", "several"] if enabled else ["without"]
        model = engine.runner._model  # type: ignore[attr-defined]
        for number in range(config.max_loras if enabled else 0):
            rank, experts = config.max_lora_rank, config.lora_experts
            adapter = random_adapter(model, rank, number, experts=experts)
            engine.load_adapter(f"random {number}", *adapter)
        measured = Measured(engine, args.steps, args.prompt)
        for load in args.loads:
            found[load] |= measure(measured, load, ways, args.repeats)
        del engine, measured, model
        gc.collect()
    for load, figures in found.items():
        least = next(iter(figures.values()))
        line = ", ".join(f"{way} {ms:.3f} ms ({ms / least:.3f})" for way, ms in figures.items())
        print(f"{load}: {line}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
