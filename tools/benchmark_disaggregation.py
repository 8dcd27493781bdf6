#!/usr/bin/env python
"""What it does to running answers that prompts are computed by another engine.

    python tools/benchmark_disaggregation.py --scale 0.02 --prefix-caching-host-gb 0.5 \\
        --inference-dynamic-batching-buffer-size-gb 0.05 \\
        --inference-dynamic-batching-prefix-caching-mamba-gb 0.05

On a machine with two GPUs, of which each engine takes one (with one GPU they share it, with
--gpu-memory-utilization 0.4):

    python tools/benchmark_disaggregation.py --config configs/nemotron-h-8b.yaml --scale 1 \\
        --prefix-caching-host-gb 24 --inference-dynamic-batching-max-requests 80 \\
        --inference-dynamic-batching-num-cuda-graphs 8 --json out.json

same     8 prompts of 8,192 tokens: answers, first tokens, and tokens that were skipped, of prompts
         that the other engine computed, one after the other, and of those computed here
long     one of 65,536 tokens: its first token, computed here, read when the other engine has
         computed it, and read while it does
between  the time between tokens of 32 running answers: quiet, while the other engine computes 32
         prompts of 8,192 tokens that come at once (and are answered here, 64 tokens each), and
         while this engine computes 32 such prompts

--scale multiplies tokens and numbers of requests.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from bench.loads import Figures, run_loads
from bench.ports import free_address
from megatron_hybrid import EngineConfig, SamplingParams
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import collect_seldom
from megatron_hybrid.engine.transfers import Transfers

Prompt = npt.NDArray[np.int32]
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
GPUS = "CUDA_VISIBLE_DEVICES"


class PrefillEngine:
    """Another process's, to which prompts are sent."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        self.address = address
        config = dataclasses.replace(config, role="prefill", disaggregation_listen=address)
        self._ours, theirs = multiprocessing.get_context("spawn").Pipe()
        before, own = os.environ.get(GPUS), _second_gpu()
        if own is not None:
            os.environ[GPUS] = own
        process = multiprocessing.get_context("spawn").Process
        self._process = process(target=_compute, args=(config, theirs), daemon=True)
        self._process.start()
        if own is not None:
            os.environ.pop(GPUS) if before is None else os.environ.update({GPUS: before})

    def wait_until_ready(self) -> None:
        """Raises EOFError, if it has ended instead; its own words say why."""
        assert self._ours.recv() == "ready"

    def send(self, name: str, prompt: Prompt) -> None:
        """To be computed."""
        self._ours.send((name, prompt))

    def news(self) -> Iterator[tuple[str, bool]]:
        """The names of those that it has taken since the last call, and, by True, computed."""
        while self._ours.poll():
            yield self._ours.recv()

    def wait_for(self, name: str, *, computed: bool) -> None:
        """Until it has been taken, or computed."""
        while (name, computed) not in self.news():
            time.sleep(1e-4)

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.join()


def _second_gpu() -> str | None:
    """None, if there is none."""
    known = os.environ.get(GPUS)
    if known is not None:
        several = known.split(",")
        return several[1] if len(several) > 1 else None
    count = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in os.listdir("/dev"))
    return "1" if count > 1 else None


def _compute(config: EngineConfig, others: Connection) -> None:
    """The other process."""
    engine = build_engine(config)
    collect_seldom()  # as a server does
    others.send("ready")
    while True:
        while others.poll(0 if engine.has_work() or engine.use_idle_time() else 0.001):
            name, prompt = others.recv()
            engine.add_request(name, prompt, FIRST)
            others.send((name, False))
        if engine.has_work():
            for event in engine.step():
                if event.finish_reason is not None:
                    others.send((event.request_id, True))


class Benchmark:
    """Loads on one engine beside another one. Every prompt is drawn anew."""

    def __init__(
        self, engine: DynamicInferenceEngine, prefill: PrefillEngine, scale: float
    ) -> None:
        self.engine, self.prefill, self._scale = engine, prefill, scale
        self._random = np.random.default_rng(0)
        self._numbers = iter(range(10**9))

    def prompt(self, full: int) -> Prompt:
        """Of so many tokens, scaled."""
        size = max(2, round(full * self._scale))
        return self._random.integers(16, self.engine.vocab_size, size=size, dtype=np.int32)

    def count(self, full: int, least: int = 2) -> int:
        """Of requests, scaled."""
        return max(least, round(full * self._scale))

    def one(self, prompt: Prompt, how: str) -> tuple[list[int], float, int]:
        """Tokens, milliseconds to the first one, and skipped tokens, of a request alone: computed
        "here", "handed over", or "read ahead"."""
        begin, name, tokens, first = time.perf_counter(), f"r{next(self._numbers)}", [], 0.0
        if how != "here":
            self.prefill.send(name, prompt)
            self.prefill.wait_for(name, computed=how == "handed over")
        if how == "read ahead":
            self._follow(name, prompt)
            while not self._transfers.is_read_ahead(name):
                self.engine.use_idle_time()
                time.sleep(1e-3)
        peer = "" if how == "here" else self.prefill.address
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        self.engine.add_request(name, prompt, params, prefilled_by=peer)
        skipped = 0
        while self.engine.has_work():
            for event in self.engine.step():
                first = first or 1e3 * (time.perf_counter() - begin)
                tokens += event.token_ids
                skipped = event.cached_tokens
        return tokens, first, skipped

    @property
    def _transfers(self) -> Transfers:
        return self.engine.context.transfers

    def _follow(self, name: str, prompt: Prompt) -> None:
        """As a server does with a request whose prompt another one computes."""
        self._transfers.read_ahead(name, prompt, "", self.prefill.address, name)

    def same(self) -> Figures:
        """See the module."""
        for how in ("handed over", "here"):  # what is compiled, and connections
            self.one(self.prompt(8192), how)
        prompts = [self.prompt(8192) for _ in range(self.count(8))]
        handed = [self.one(prompt, "handed over") for prompt in prompts]
        self.engine.reset_prefix_cache()
        here = [self.one(prompt, "here") for prompt in prompts]
        return {
            "prompts": len(prompts),
            "tokens_each": len(prompts[0]),
            "same_answers": sum(a[0] == b[0] for a, b in zip(handed, here, strict=True)),
            "skipped_whole": sum(a[2] == len(p) for a, p in zip(handed, prompts, strict=True)),
            "first_token_handed_over_ms": float(np.median([one[1] for one in handed])),
            "first_token_computed_here_ms": float(np.median([one[1] for one in here])),
        }

    def long(self) -> Figures:
        """See the module."""
        ways = ("here", "handed over", "read ahead")
        for how in ways:  # the same
            self.one(self.prompt(65536), how)
        found = {how: self.one(self.prompt(65536), how) for how in ways}
        return {
            **{f"first_token_{how.replace(' ', '_')}_ms": one[1] for how, one in found.items()},
            "skipped_of_read_ahead": found["read ahead"][2],
        }

    def between(self) -> Figures:
        """See the module."""
        found: Figures = {}
        for kind in ("quiet", "elsewhere", "here"):
            self.engine.reset_prefix_cache()
            gaps, skipped = self._gaps(kind)
            p50, p99 = (float(np.percentile(gaps, q)) for q in (50, 99))
            found[kind] = {"steps": len(gaps), "p50_ms": p50, "p99_ms": p99, "max_ms": max(gaps)}
            if kind != "quiet":
                found[kind]["p99_to_quiet"] = p99 / found["quiet"]["p99_ms"]
                found[kind]["skipped_share"] = skipped
        return found

    def _gaps(self, kind: str) -> tuple[list[float], float]:
        """Milliseconds between steps in which all running answers go on, while prompts come; and
        what was skipped of these."""
        engine, requests = self.engine, self.count(32)
        longest = engine.context.max_seq_length // 2
        params = SamplingParams(temperature=0.0, max_tokens=min(8192, longest), ignore_eos=True)
        running = [f"r{next(self._numbers)}" for _ in range(requests)]
        for name in running:
            engine.add_request(name, self.prompt(1024), params)
        while len(engine.context.rows.decoding.nonzero()[0]) < requests:
            engine.step()
        for _ in range(20):
            engine.step()
        arriving = {} if kind == "quiet" else {
            f"r{next(self._numbers)}": self.prompt(8192) for _ in range(requests)
        }  # fmt: skip
        answer = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        for name, prompt in arriving.items():
            if kind == "elsewhere":
                self.prefill.send(name, prompt)
            else:
                engine.add_request(name, prompt, answer)
        open_names, skipped = set(arriving), 0
        gaps: list[float] = []
        followed: list[str] = []
        last, most = time.perf_counter(), max(20, round(500 * self._scale))
        while open_names or len(gaps) < most:
            for name, computed in self.prefill.news():
                if not computed:
                    self._follow(name, arriving[name])
                    followed.append(name)
            for name in [one for one in followed if self._transfers.is_read_ahead(one)]:
                followed.remove(name)
                engine.add_request(name, arriving[name], answer, prefilled_by=self.prefill.address)
            for event in engine.step():
                if event.request_id == running[0]:
                    now = time.perf_counter()
                    gaps.append(1e3 * (now - last))
                    last = now
                if event.finish_reason is not None and event.request_id in open_names:
                    open_names.discard(event.request_id)
                    skipped += event.cached_tokens
        for name in running:
            engine.abort(name)
        while engine.has_work():
            engine.step()
        return gaps, skipped / max(1, sum(map(len, arriving.values())))


def measure(
    config: EngineConfig, names: Sequence[str], scale: float
) -> Iterator[tuple[str, Figures]]:
    """Figures by load."""
    prefill = PrefillEngine(config, free_address())
    try:
        config = dataclasses.replace(config, role="decode", disaggregation_peers=prefill.address)
        benchmark = Benchmark(build_engine(config), prefill, scale)
        collect_seldom()
        prefill.wait_until_ready()
        for name in names:
            yield name, getattr(benchmark, name)()
    finally:
        prefill.end()


def main() -> int:
    return run_loads(__doc__, ["same", "long", "between"], measure)


if __name__ == "__main__":
    sys.exit(main())
