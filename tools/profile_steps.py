#!/usr/bin/env python
"""Where a GPU's time goes in steady steps of the engine: its busy share, and kernel by kernel.

    python tools/profile_steps.py --config configs/nemotron-h-8b.yaml decode_1 decode_256 prefill

With several GPUs every replica has the same requests, and the first rank reports:

    torchrun --nproc-per-node 2 tools/profile_steps.py --config configs/nemotron-h-8b.yaml \\
        --tensor-model-parallel-size 2 decode_32

`decode_N`: N requests of --prompt-length tokens that decode. `prefill`: prompts of 4,096 tokens as
many as a step takes. `hit`: one request at a time of --prompt-length tokens that are cached and 16
that are not, up to its first token, which counts as a step. Besides the profile, the time of a step
without the profiler is measured, and the share of it that the host spends waiting for the device:
what is left of it is the host's own work.

--in-order N lists N kernels from the middle of a step as they follow one another, with the time in
which nothing ran before each: what a layer consists of.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_hybrid import SamplingParams
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.errors import ConfigurationError

IS_FIRST = os.environ.get("RANK", "0") == "0"
LONG_PROMPT = 4096  # tokens, of prefill
NEW_TOKENS = 16  # of a hit


@dataclass
class KernelTime:
    calls: int = 0
    microseconds: float = 0.0


class Load:
    """Requests for an engine."""

    def __init__(self, engine: DynamicInferenceEngine, prompt_length: int) -> None:
        self.engine = engine
        self.prompt_length = prompt_length
        self._random = np.random.default_rng(0)
        self._sent = 0
        self._known: list[int] = []

    def submit(self, length: int, max_tokens: int, known: Sequence[int] = ()) -> None:
        """A request of `known` tokens and `length` random ones."""
        prompt = [*known, *self._tokens(length)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(str(self._sent), prompt, params)
        self._sent += 1

    def prepare(self, name: str, steps: int) -> None:
        """Bring the engine to where the steps to look at begin."""
        self._known = self._tokens(self.prompt_length) if name == "hit" else []
        if name == "hit":
            for _ in range(8):
                self.step()
            return
        if name == "prefill":
            budget = self.engine.context.max_tokens
            for _ in range(2):  # the first round compiles what is not compiled yet
                self.drain()
                for _ in range(-(-budget * (2 * steps + 8) // LONG_PROMPT)):
                    self.submit(LONG_PROMPT, 2)
                for _ in range(3):
                    self.engine.step()
            return
        count = int(name.removeprefix("decode_"))
        # The first ones go on until the last ones are there.
        prefills = count * self.prompt_length // self.engine.context.max_tokens
        for _ in range(count):
            self.submit(self.prompt_length, 3 * steps + 64 + 2 * prefills)
        while self.engine.stats()["last_step"]["decode_tokens"] < count:
            self.engine.step()
        for _ in range(8):
            self.engine.step()

    def step(self) -> None:
        if self._known:
            self.submit(NEW_TOKENS, 1, self._known)
            self.drain()
        else:
            self.engine.step()

    def drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(16, self.engine.vocab_size, size=count).tolist()


def look_at(load: Load, name: str, steps: int, rows: int, in_order: int) -> None:
    load.prepare(name, steps)
    torch.cuda.synchronize()
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(steps):
        load.step()
    torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            load.step()
        torch.cuda.synchronize()
    load.drain()
    if not IS_FIRST:
        return
    kernels, busy, span = summarize(recorded.events())
    print(
        f"\n{name}: {1e3 * wall / steps:.2f} ms a step; CPU time {1e3 * cpu / steps:.2f} ms; "
        f"profiled: {span / steps / 1e3:.2f} ms a step, GPU busy {busy / span:.1%} of it"
    )
    print("| us a step | calls | us each | kernel |\n|---|---|---|---|")
    ordered = sorted(kernels.items(), key=lambda item: -item[1].microseconds)
    for kernel, spent in ordered[:rows]:
        print(
            f"| {spent.microseconds / steps:9.1f} | {spent.calls / steps:5.1f} "
            f"| {spent.microseconds / spent.calls:7.1f} | {kernel[:90]} |"
        )
    if in_order:
        show_in_order(recorded.events(), in_order)


def show_in_order(events: Any, count: int) -> None:
    """`count` kernels from the middle of what was recorded, with the gaps between them, and by how
    much each put off the end: of one that starts while another runs, that is less than its time."""
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    on_device.sort(key=lambda event: event.time_range.start)
    first = max((len(on_device) - count) // 2, 1)
    reached = max(event.time_range.end for event in on_device[:first])
    print("| us idle before | us | us later | kernel |\n|---|---|---|---|")
    for event in on_device[first : first + count]:
        span = event.time_range
        print(
            f"| {max(span.start - reached, 0.0):5.1f} | {span.elapsed_us():7.1f} "
            f"| {max(span.end - reached, 0.0):7.1f} | {event.name[:90]} |"
        )
        reached = max(reached, span.end)


def summarize(events: Any) -> tuple[dict[str, KernelTime], float, float]:
    """Time by kernel, and microseconds that anything ran, and from the first to the last."""
    kernels: dict[str, KernelTime] = defaultdict(KernelTime)
    intervals = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].calls += 1
            kernels[event.name].microseconds += event.time_range.elapsed_us()
            intervals.append((event.time_range.start, event.time_range.end))
    intervals.sort()
    busy, reached = 0.0, intervals[0][0]
    for start, end in intervals:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return kernels, busy, reached - intervals[0][0]


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="+", metavar="LOAD", help="decode_N, prefill or hit")
    parser.add_argument("--steps", type=int, default=10, help="steps to look at (default: 10)")
    parser.add_argument(
        "--prompt-length",
        type=int,
        default=1024,
        help="tokens, of decode_N and hit (default: 1024)",
    )
    parser.add_argument("--rows", type=int, default=20, help="kernels to list (default: 20)")
    parser.add_argument(
        "--in-order",
        type=int,
        default=0,
        metavar="N",
        help="kernels to list as they follow one another (default: 0)",
    )
    add_engine_arguments(parser)
    args = parser.parse_args()
    for name in args.loads:
        if name not in ("prefill", "hit") and not name.removeprefix("decode_").isdigit():
            parser.error(f"{name!r} is not decode_N, with a number N, prefill or hit.")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU, and there is nothing else to look at here.")
    try:
        engine = build_engine(engine_config_from_args(args))
    except ConfigurationError as error:
        print(f"profile_steps.py: {error}", file=sys.stderr)
        return 2
    for name in args.loads:
        look_at(Load(engine, args.prompt_length), name, args.steps, args.rows, args.in_order)
    return 0


if __name__ == "__main__":
    sys.exit(main())
