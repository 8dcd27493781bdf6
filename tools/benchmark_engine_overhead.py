#!/usr/bin/env python
"""Times what the engine does besides the model's forward pass. Needs no weights and no GPU.

    python tools/benchmark_engine_overhead.py
    python tools/benchmark_engine_overhead.py --requests 256 --steps 2000 --json out.json
    python tools/benchmark_engine_overhead.py --logprobs 0
    python tools/benchmark_engine_overhead.py --waiting 100000

Three figures:

step       the engine's own step (schedule, build the batch, sample, commit) with all requests
           decoding, on a runner that takes its logits from a fixed table; requests cross block
           boundaries at different times, and the cache is full, so every new block evicts one
waiting    the longest step, with --waiting, while so many requests wait: they come at once and
           share the first half of their prompts by the thousand; some get a row and others end
           in every step, then all rows at once; then the engine is paused, its weights change,
           and everybody who waits is aborted
eviction   freeing the least recently used cached block and handing it out again, at several
           sizes of the cache: it should not matter how large the cache is
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bench.computed import Computed
from bench.environment import describe_environment
from bench.measurements import distribution
from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.cache.block_hash import extend_keys, root_key
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import collect_seldom
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.cuda_graphs import graph_sizes, smallest_fit
from megatron_hybrid.execution.plan import CatchUp, StepDemand, StepPlan, WeightsSource
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.sampler import Sampler
from megatron_hybrid.kernels.sampling import reference as sampling
from megatron_hybrid.parallel import initialize
from megatron_hybrid.request import SamplingParams

BLOCK_SIZE = 64
KERNEL_CHUNK = 128
CHAIN = 32  # blocks in one cached sequence
SHARERS = 1000  # waiting requests whose prompts begin alike
ROUND = 200  # the most tokens of one's answer


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps to time")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="tokens in each request's prompt"
    )
    parser.add_argument(
        "--waiting", type=int, default=0, help="requests that wait behind them (default: none)"
    )
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_SIZE, help="tokens in a KV block, with --waiting"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=512, help="logits to sample from, a request and step"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="every token's log-probability is wanted, and of N likeliest ones (default: none)",
    )
    parser.add_argument(
        "--cached-blocks",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000],
        help="sizes of the cache at which eviction is timed",
    )
    parser.add_argument("--evictions", type=int, default=5000, help="blocks to evict at each size")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON to this file too")
    args = parser.parse_args()
    for name in ("requests", "steps", "prompt_tokens", "vocab_size", "evictions", "block_size"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is {getattr(args, name)}; give at least 1.")
    if args.waiting < 0:
        parser.error(f"--waiting is {args.waiting}; give 0 or more.")
    if min(args.cached_blocks) < CHAIN:
        parser.error(f"--cached-blocks must be at least {CHAIN}, one cached sequence.")
    return args


def time_evictions(cached_blocks: int, evictions: int) -> dict[str, Any]:
    """Microseconds to get one block from a cache that is full of `cached_blocks` cached ones."""
    geometry = CacheGeometry(
        block_size=BLOCK_SIZE,
        kernel_chunk=KERNEL_CHUNK,
        num_blocks=cached_blocks,
        max_requests=1,
        num_cached_slots=64,
        bytes_per_block=1,
        bytes_per_state=1,
    )
    cache = HybridCache(geometry)
    allocator = cache.kv
    random = np.random.default_rng(0)

    def cache_sequence(length: int) -> None:
        """Compute, publish and let go of a sequence that nobody has seen before."""
        tokens = random.integers(2**15, size=length * BLOCK_SIZE, dtype=np.int32)
        blocks = allocator.allocate(length)
        for block, key in zip(blocks, extend_keys(root_key(0), tokens, BLOCK_SIZE), strict=True):
            allocator.map(block, key)
        allocator.release(blocks)

    for start in range(0, cached_blocks, CHAIN):
        cache_sequence(min(CHAIN, cached_blocks - start))
    assert allocator.num_cached == cached_blocks

    microseconds = []
    keys = iter(
        extend_keys(
            root_key(1),
            random.integers(2**15, size=evictions * BLOCK_SIZE, dtype=np.int32),
            BLOCK_SIZE,
        )
    )
    gc.collect()
    before = allocator.evictions
    for _ in range(evictions):
        start_ns = time.perf_counter_ns()
        (block,) = cache.store.allocate_blocks(1)
        microseconds.append((time.perf_counter_ns() - start_ns) / 1e3)
        allocator.map(block, next(keys))
        allocator.release((block,))
    assert allocator.evictions - before == evictions
    cache.check_integrity([])
    return {"cached_blocks": cached_blocks, "us_per_block": distribution(microseconds)}


class FixedLogitsRunner:
    """Builds every batch and samples from it, but computes no model."""

    asynchronous = False

    def __init__(
        self, rows: RowTable, vocab_size: int, max_requests: int, block_size: int = BLOCK_SIZE
    ) -> None:
        self._rows = rows
        self._builder = BatchBuilder(rows, block_size, torch.device("cpu"), 8192)
        # As on a GPU, where graphs compute the decodes.
        self._sizes = graph_sizes(-1, 0, max_requests, 8192)
        self._sampler = Sampler(rows, sampling, initialize())
        self._last_token = torch.zeros(max_requests, dtype=torch.int64)
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(max_requests, vocab_size, generator=generator)
        self.seconds = 0.0  # in here

    def launch(self, plan: StepPlan, agreed: StepDemand | None = None) -> Computed:
        start = time.perf_counter()
        size = smallest_fit(self._sizes, StepDemand.of(plan))
        inputs = self._builder.build(plan, size)
        logits = self._logits[: len(plan.sampled_rows)]
        sampled = self._sampler.sample(logits, plan, inputs.sampled_rows, self._last_token)
        result = sampled.result()
        self.seconds += time.perf_counter() - start
        return Computed(result)

    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        pass

    def dummy_forward(self, agreed: StepDemand | None = None) -> None:
        pass

    def capture_next(self) -> bool:
        return False

    def update_weights(self, source: WeightsSource) -> frozenset[str]:
        return frozenset()

    def load_adapter(self, slot: int | None, source: WeightsSource, config: object) -> str:
        return ""


def time_steps(
    requests: int, prompt_tokens: int, steps: int, vocab_size: int, logprobs: int | None = None
) -> dict[str, Any]:
    """Milliseconds a step with `requests` requests decoding."""
    # Staggered lengths: in each step another few requests cross a block boundary.
    lengths = [prompt_tokens + i % BLOCK_SIZE for i in range(requests)]
    longest = max(lengths) + steps + 1
    blocks_each = -(-longest // BLOCK_SIZE)
    geometry = CacheGeometry(
        block_size=BLOCK_SIZE,
        kernel_chunk=KERNEL_CHUNK,
        num_blocks=requests * (blocks_each + 1),  # one that admissions leave free for each
        max_requests=requests,
        num_cached_slots=requests,
        bytes_per_block=1,
        bytes_per_state=1,
    )
    context = DynamicInferenceContext(
        geometry, max_tokens=8192, max_seq_length=blocks_each * BLOCK_SIZE + 1
    )
    runner = FixedLogitsRunner(context.rows, vocab_size, requests)
    engine = DynamicInferenceEngine(context, runner, vocab_size=vocab_size)
    random = np.random.default_rng(0)

    def submit(name: str, length: int, max_tokens: int) -> None:
        prompt = random.integers(vocab_size, size=length).tolist()
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
        )
        engine.add_request(name, prompt, params)

    # Fill the cache with what earlier requests left behind.
    for i in range(requests):
        submit(f"earlier {i}", blocks_each * BLOCK_SIZE, 1)
    while engine.has_work():
        engine.step()
    for i, length in enumerate(lengths):
        submit(f"request {i}", length, longest - length)
    while engine.stats()["last_step"]["decode_tokens"] < requests:
        engine.step()

    gc.collect()
    evictions, runner.seconds = engine.stats()["kv_evictions"], 0.0
    milliseconds, cpu_milliseconds = [], []
    # The requests that were admitted first are also the first to end.
    timed = range(min(steps, longest - max(lengths) - 1))
    for _ in tqdm(timed, "steps"):
        start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
        events = engine.step()
        cpu, wall = time.process_time_ns() - cpu_start, time.perf_counter_ns() - start
        if len(events) < requests:
            break
        milliseconds.append(wall / 1e6)
        cpu_milliseconds.append(cpu / 1e6)
    engine.check_integrity()
    return {
        "requests": requests,
        "steps": len(milliseconds),
        "ms_per_step": distribution(milliseconds) | {"max": max(milliseconds)},
        # Without what other processes on the machine take away.
        "cpu_ms_per_step": distribution(cpu_milliseconds) | {"max": max(cpu_milliseconds)},
        "of_it_batch_and_sampling_ms": 1e3 * runner.seconds / len(milliseconds),
        "evicted_blocks": engine.stats()["kv_evictions"] - evictions,
        "vocab_size": vocab_size,
    }


class Waiting:
    """An engine with `requests` rows before which `waiting` requests come at once."""

    def __init__(
        self, requests: int, waiting: int, prompt_tokens: int, vocab_size: int, block_size: int
    ) -> None:
        longest = prompt_tokens + 2 * ROUND
        geometry = CacheGeometry(
            block_size=block_size,
            kernel_chunk=KERNEL_CHUNK,
            num_blocks=3 * requests * -(-longest // block_size),
            max_requests=requests,
            num_cached_slots=2 * requests,
            bytes_per_block=1,
            bytes_per_state=1,
        )
        context = DynamicInferenceContext(geometry, max_tokens=8192, max_seq_length=longest)
        runner = FixedLogitsRunner(context.rows, vocab_size, requests, block_size)
        self.engine = DynamicInferenceEngine(context, runner, vocab_size=vocab_size)
        self.milliseconds: dict[str, list[float]] = {}
        self.cpu_milliseconds: dict[str, list[float]] = {}
        random = np.random.default_rng(0)
        shared = prompt_tokens // 2
        beginnings = random.integers(vocab_size, size=(-(-waiting // SHARERS) or 1, shared))
        self.names = [f"request {i}" for i in range(requests + waiting)]
        start = time.perf_counter()
        for i, name in enumerate(self.names):
            own = random.integers(vocab_size, size=prompt_tokens - shared)
            prompt = np.concatenate([beginnings[i % len(beginnings)], own]).tolist()
            # The first ones end together, those behind them one by one.
            count = ROUND if i < requests else int(random.integers(1, ROUND))
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            self.engine.add_request(name, prompt, params)
        self.submit_us = 1e6 * (time.perf_counter() - start) / len(self.names)

    def time_steps(self, name: str, steps: int) -> None:
        wall_times = self.milliseconds.setdefault(name, [])
        cpu_times = self.cpu_milliseconds.setdefault(name, [])
        for _ in tqdm(range(steps), name):
            start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
            events = self.engine.step()
            cpu_times.append((time.process_time_ns() - cpu_start) / 1e6)
            wall_times.append((time.perf_counter_ns() - start) / 1e6)
            del events  # which takes time that is the server's, where many were aborted


def time_waiting(
    requests: int, waiting: int, prompt_tokens: int, steps: int, vocab_size: int, block_size: int
) -> dict[str, Any]:
    """Milliseconds a step with `waiting` requests behind `requests` running ones."""
    crowd = Waiting(requests, waiting, prompt_tokens, vocab_size, block_size)
    engine = crowd.engine
    crowd.time_steps("running", steps)
    engine.pause("finish")
    crowd.time_steps("paused", 20)
    engine.resume()
    engine.update_weights({})
    crowd.time_steps("new weights", steps // 2)
    still = engine.num_waiting
    start = time.perf_counter()
    for name in crowd.names:
        engine.abort(name)
    abort_us = 1e6 * (time.perf_counter() - start) / still
    crowd.time_steps("aborted", 1)
    engine.check_integrity()
    return {
        "requests": requests,
        "waiting": waiting,
        "still_waiting": still,
        "block_size": block_size,
        "prompt_tokens": prompt_tokens,
        "us_per_submit": crowd.submit_us,
        "us_per_abort": abort_us,
        "ms_per_step": _with_extremes(crowd.milliseconds),
        "cpu_ms_per_step": _with_extremes(crowd.cpu_milliseconds),
    }


def _with_extremes(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: distribution(values)
        | {"p99": float(np.percentile(values, 99)), "max": max(values), "steps": len(values)}
        for name, values in times.items()
    }


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    steps = time_steps(
        args.requests, args.prompt_tokens, args.steps, args.vocab_size, args.logprobs
    )
    times, cpu = steps["ms_per_step"], steps["cpu_ms_per_step"]
    print(
        f"{steps['requests']} requests decoding: {times['p50']:.3f} ms a step (median), mean"
        f" {times['mean']:.3f}, p95 {times['p95']:.3f} (CPU time: median {cpu['p50']:.3f},"
        f" p95 {cpu['p95']:.3f}); {steps['steps']} steps,"
        f" {steps['evicted_blocks']} blocks evicted",
        file=sys.stderr,
    )
    evictions = [time_evictions(n, args.evictions) for n in tqdm(args.cached_blocks, "evictions")]
    for row in evictions:
        microseconds = row["us_per_block"]
        print(
            f"eviction at {row['cached_blocks']:7} cached blocks: {microseconds['p50']:.2f} us"
            f" (median), mean {microseconds['mean']:.2f}, p95 {microseconds['p95']:.2f}",
            file=sys.stderr,
        )
    report = {"step": steps, "eviction": evictions, **describe_environment()}
    if args.waiting:
        collect_seldom()  # as the server's engine process does
        waiting = report["waiting"] = time_waiting(
            args.requests, args.waiting, args.prompt_tokens, args.steps, args.vocab_size,
            args.block_size,
        )  # fmt: skip
        for name, times in waiting["ms_per_step"].items():
            cpu = waiting["cpu_ms_per_step"][name]
            print(
                f"{args.waiting} waiting, {name}: {times['p50']:.2f} ms a step (median), p99"
                f" {times['p99']:.2f}, longest {times['max']:.2f} (CPU time: median"
                f" {cpu['p50']:.2f}, p99 {cpu['p99']:.2f}, longest {cpu['max']:.2f})",
                file=sys.stderr,
            )
        print(
            f"submitting takes {waiting['us_per_submit']:.1f} us a request, aborting"
            f" {waiting['us_per_abort']:.1f} us",
            file=sys.stderr,
        )
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
