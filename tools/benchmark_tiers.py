#!/usr/bin/env python
"""What memory of the host behind the device's caches is worth, in this process.

    python tools/benchmark_tiers.py --scale 0.02 --prefix-caching-host-gb 0.5 \\
        --inference-dynamic-batching-buffer-size-gb 0.03 \\
        --inference-dynamic-batching-prefix-caching-mamba-gb 0.012

On a GPU, with caches of 8 GB there:

    python tools/benchmark_tiers.py --config configs/nemotron-h-8b.yaml --scale 1 \\
        --prefix-caching-host-gb 64 --inference-dynamic-batching-buffer-size-gb 4 \\
        --inference-dynamic-batching-prefix-caching-mamba-gb 4 --json out.json

resume   a conversation of 65,552 tokens goes on, computed, from the device, from the host
replay   200 prompts of 8,448 tokens, then the first 8 of them again, twice: from the host, and
         from the device (SGLang's issue 39436)
decodes  the time between tokens of 32 decodes, quiet and while copies run in both directions, to
         and from pages that nobody else uses, until 50 GB have gone each way
chats    eight times as many chats of six turns (2,048 tokens that all share, 1,024, then 512 each;
         answers of 128) as the device holds, 32 at once, with the tier and without
restart  with --prefix-caching-disk: a conversation of 65,552 tokens goes on in a second engine, of
         which the first has written files

Times to first token are those of one request alone, but for `chats`. --scale multiplies tokens and
numbers of requests.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bench.driver import run_workload
from bench.loads import Figures, run_loads
from bench.measurements import RequestRecord
from bench.workloads import Round, Workload, WorkloadRequest
from megatron_hybrid import EngineConfig, SamplingParams
from megatron_hybrid.cache.host_tier import Copy, HostTier
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import collecting_seldom
from megatron_hybrid.engine.lower_transfers import LowerTransfers
from megatron_hybrid.engine.transfers import MOST_WRITES, HostTransfers, Ticket
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.hybrid_model import HybridModel

LONGEST = 65536  # tokens; and an answer of 16
MOVED = 50e9  # bytes, each way


class Benchmark:
    """Loads on one engine. Every prompt is drawn anew."""

    def __init__(self, engine: DynamicInferenceEngine, scale: float) -> None:
        self.engine, self._scale = engine, scale
        self._random = np.random.default_rng(0)
        self._drawn = 0
        self._records: list[RequestRecord] = []

    def tokens(self, full: int) -> tuple[int, ...]:
        """So many, scaled."""
        size = max(2, round(full * self._scale))
        return tuple(self._random.integers(16, self.engine.vocab_size, size=size).tolist())

    def count(self, full: int, least: int = 2) -> int:
        """Of requests, scaled."""
        return max(least, round(full * self._scale))

    def run(self, *rounds: Round) -> list[float]:
        """Milliseconds to the first token, of all requests in order."""
        self._records = run_workload(self.engine, Workload("tiers", rounds)).records
        return [1e3 * record.time_to_first_token for record in self._records]

    def hits(self) -> int:
        """Of the last run's requests those that computed nothing of their prompts, or one token."""
        return sum(one.cached_tokens >= one.prompt_tokens - 1 for one in self._records)

    def fetched(self) -> tuple[int, int]:
        """Tokens and bytes that came from the host so far."""
        stats = self.engine.stats()
        kinds = ("tier_tokens_fetched", "tier_bytes_fetched")
        tokens, size = (sum(stats[kind].values()) for kind in kinds)
        return tokens, size

    def request(
        self, chat: str, full: int, answer: int, before: tuple[int, ...] = ()
    ) -> WorkloadRequest:
        """The chat's next one, of so many new tokens, scaled, behind others."""
        self._drawn += 1
        return WorkloadRequest(f"{chat}.{self._drawn}", chat, before + self.tokens(full), answer)

    def resume(self) -> Figures:
        """See the module."""
        geometry = self.engine.context.geometry
        warm = self.request("warm", LONGEST, 16), self.request("warm", 256, 4)
        first = self.request("long", LONGEST, 16)
        again, back = (self.request("long", 256, 4) for _ in range(2))
        # As many as the device holds, or more.
        kv = geometry.num_blocks * geometry.block_size / len(first.new_tokens)
        others = (self.request(f"other{i}", LONGEST, 2) for i in range(2 + int(kv)))
        rounds = [*warm, first, again, *others, back]
        found = self.run(*((one,) for one in rounds))
        tokens, size = self.fetched()
        return {
            "computed_ms": found[2], "device_ms": found[3], "host_ms": found[-1],
            "tokens_fetched": tokens, "bytes_fetched": size, "bytes_a_second": self.rate(),
            "transfer_ms": 1e3 * size / self.rate(),
        }  # fmt: skip

    def rate(self) -> float:
        """Bytes a second from the host, as measured."""
        return copier_of(self.engine).rate()

    def replay(self) -> Figures:
        """See the module."""
        count, again = self.count(200, 24), min(8, self.count(8, 4))
        prompts = [self.tokens(8448) for _ in range(count)]

        def ask(number: int, turn: int) -> Round:
            return (WorkloadRequest(f"{turn}.{number}", f"{turn}.{number}", prompts[number], 4),)

        cold = self.run(*(ask(i, 0) for i in range(count)))
        before = self.fetched()
        host = self.run(*(ask(i, 1) for i in range(again)))
        hits = self.hits()
        tokens, size = (now - then for now, then in zip(self.fetched(), before, strict=True))
        device = self.run(*(ask(i, 2) for i in range(again)))
        return {
            "computed_ms": statistics.median(cold),
            "host_ms": statistics.median(host),
            "device_ms": statistics.median(device),
            "replayed": again,
            "hits": hits,
            "tokens_fetched": tokens / again,
            "bytes_fetched": size / again,
            "transfer_ms": 1e3 * size / again / self.rate(),
        }

    def decodes(self) -> Figures:
        """See the module."""
        engine, steps = self.engine, max(20, round(400 * self._scale))
        requests = self.count(32)

        def step_ms(between: Callable[[], bool]) -> float:
            """On average, of all steps until `between` has done its work."""
            first = [self.request(f"d{i}", 1024, 4096) for i in range(requests)]
            for one in first:
                engine.add_request(one.request_id, list(one.new_tokens), _long_answer(engine))
            while len(engine.context.rows.decoding.nonzero()[0]) < requests:
                engine.step()
            for _ in range(10):
                engine.step()
            start, done = time.perf_counter(), 0
            while not between():
                engine.step()
                done += 1
            found = 1e3 * (time.perf_counter() - start) / done
            for one in first:
                engine.abort(one.request_id)
            while engine.has_work():
                engine.step()
            return found

        counted = iter(range(steps))
        quiet = step_ms(lambda: next(counted, None) is None)
        moving = Moving(engine, MOVED * min(1.0, self._scale) ** 2)
        busy = step_ms(moving.go_on)
        moving.end()
        return {"quiet_ms": quiet, "busy_ms": busy, **moving.figures}

    def chats(self) -> Figures:
        """See the module; also for an engine without the tier."""
        geometry = self.engine.context.geometry
        turns, answer = 6, self.count(128)
        system = self.tokens(2048)
        # of each chat's own
        tokens = round(self._scale * (1024 + 512 * (turns - 1))) + turns * answer
        each = geometry.blocks_for(tokens) * geometry.bytes_per_block
        each += geometry.bytes_per_cached_slot * geometry.has_recurrent
        cached = geometry.num_cached_slots * geometry.bytes_per_cached_slot
        held = (geometry.num_blocks * geometry.bytes_per_block + cached) / each
        count, at_once = max(8, round(8 * held)), self.count(32, 4)
        warm = self.tokens(2048)  # what is compiled for such steps is compiled with these
        self.run(tuple(self.request(f"w{i}", 1024, 2, warm) for i in range(at_once)))
        self.engine.reset_prefix_cache()
        rounds = []
        for turn in range(turns):
            new, before = (512, ()) if turn else (1024, system)
            chats = [self.request(f"c{i}", new, answer, before) for i in range(count)]
            rounds += [tuple(chats[i : i + at_once]) for i in range(0, count, at_once)]
        run = run_workload(self.engine, Workload("chats", tuple(rounds)))
        cached = sum(record.cached_tokens for record in run.records)
        later = sum(run.round_walls[-(len(rounds) // turns) * (turns - 1) :])
        return {
            "chats": count, "at_once": at_once, "held_by_the_device": held,
            "wall_s": run.wall, "later_turns_s": later,
            "skipped": cached / sum(record.prompt_tokens for record in run.records),
        }  # fmt: skip


def restart(config: EngineConfig, model: HybridModel, scale: float) -> Figures:
    """See the module."""
    engine = build_engine(config, model=model)
    benchmark = Benchmark(engine, scale)
    tokens = list(benchmark.tokens(LONGEST))
    answer = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    engine.add_request("long", list(tokens), answer)
    while engine.has_work():
        for event in engine.step():
            tokens += event.token_ids
    begin, lower = time.perf_counter(), lower_of(engine)
    while engine.use_idle_time() or lower.saves():
        time.sleep(1e-3)
    written_s, written = time.perf_counter() - begin, engine.stats()["tier_bytes_written"]["disk"]
    lower.close()
    del engine, lower, benchmark
    gc.collect()
    benchmark = Benchmark(build_engine(config, model=model), scale)
    again = WorkloadRequest("again", "again", (*tokens, *benchmark.tokens(256)), 4)
    _, disk_ms = benchmark.run((benchmark.request("warm", 256, 4),), (again,))
    stats, lower = benchmark.engine.stats(), lower_of(benchmark.engine)
    lower.close()
    return {
        "disk_ms": disk_ms, "tokens_fetched": stats["tier_tokens_fetched"]["disk"],
        "bytes_fetched": stats["tier_bytes_fetched"]["disk"], "bytes_a_second": lower.read_rate,
        "written_s": written_s, "bytes_written": written,
    }  # fmt: skip


class Moving:
    """Copies both ways, of 64 blocks and a state each, always as many as an engine has on their way
    at once, until so many bytes have gone each way."""

    def __init__(self, engine: DynamicInferenceEngine, wanted: float) -> None:
        self._store, self._host = engine.context.cache.store, transfers_of(engine).tier.host
        self._copier, self._wanted = copier_of(engine), wanted
        geometry = engine.context.geometry
        self._state = geometry.has_recurrent
        count = min(64, geometry.num_blocks // 8)
        self._slots: list[int] = []  # of the host
        self._copies = [self._place(count) for _ in range(2)]
        self._size = count * geometry.bytes_per_block
        self._size += geometry.bytes_per_cached_slot * self._state
        self._moved = [0.0, 0.0]
        self._jobs: list[deque[Ticket]] = [deque(), deque()]
        self._begin = 0.0
        self.figures: Figures = {}

    def _place(self, count: int) -> Copy:
        blocks = self._store.allocate_blocks(count)
        slot = self._store.allocate_slot(for_checkpoint=True) if self._state else 0
        place = self._host.allocate(count, state=self._state)
        assert place is not None, "the host's memory is too small"
        pages, host_slot = place
        self._slots.append(host_slot)
        return Copy(blocks, pages, slot, self._host.pages_of(host_slot) if self._state else [])

    def go_on(self) -> bool:
        """Begin what can be; whether all has gone."""
        self._begin = self._begin or time.perf_counter()
        begins = self._copier.write, self._copier.fetch
        for way, (jobs, begin) in enumerate(zip(self._jobs, begins, strict=True)):
            while jobs and jobs[0].is_done():
                jobs.popleft()
                self._moved[way] += self._size
            while len(jobs) < MOST_WRITES:
                jobs.append(begin(self._copies[way]))
        return min(self._moved) >= self._wanted

    def end(self) -> None:
        """Nothing is on its way any more, and nothing kept."""
        seconds = time.perf_counter() - self._begin
        names = "bytes_a_second_to_the_host", "bytes_a_second_from_the_host"
        self.figures = {n: moved / seconds for n, moved in zip(names, self._moved, strict=True)}
        while not all(job.is_done() for jobs in self._jobs for job in jobs):
            time.sleep(1e-3)
        for copy, slot in zip(self._copies, self._slots, strict=True):
            HostTier.give_back(self._store, copy.slot, copy.blocks)
            HostTier.give_back(self._host, slot, copy.pages)


def transfers_of(engine: DynamicInferenceEngine) -> HostTransfers:
    """Raises ConfigurationError without --prefix-caching-host-gb."""
    found = engine.context.transfers
    if not isinstance(found, HostTransfers):
        raise ConfigurationError("--prefix-caching-host-gb is 0; this measures what it is worth.")
    return found


def lower_of(engine: DynamicInferenceEngine) -> LowerTransfers:
    """Raises ConfigurationError without --prefix-caching-disk."""
    found = transfers_of(engine).lower
    if not isinstance(found, LowerTransfers):
        raise ConfigurationError("--prefix-caching-disk is not given; `restart` reads from there.")
    return found


def copier_of(engine: DynamicInferenceEngine) -> Any:
    """What moves its pages."""
    return transfers_of(engine).copier


def _long_answer(engine: DynamicInferenceEngine) -> SamplingParams:
    longest = engine.context.max_seq_length // 2
    return SamplingParams(temperature=0.0, max_tokens=min(4096, longest), ignore_eos=True)


def measure(
    config: EngineConfig, names: Sequence[str], scale: float
) -> Iterator[tuple[str, Figures]]:
    """Figures by load."""
    model = load_weights(config)
    engine = build_engine(config, model=model)
    transfers_of(engine)
    for name in names:
        engine.reset_prefix_cache()
        if name != "restart":
            with collecting_seldom():  # as a server does
                yield name, getattr(Benchmark(engine, scale), name)()
    del engine
    gc.collect()
    if "restart" in names:
        yield "restart", restart(config, model, scale)
        gc.collect()
    if "chats" in names:
        without = dataclasses.replace(
            config, prefix_caching_host_gb=0.0, prefix_caching_disk=None, prefix_caching_disk_gb=0.0
        )
        engine = build_engine(without, model=model)
        with collecting_seldom():
            yield "chats without", Benchmark(engine, scale).chats()


def main() -> int:
    loads = "resume", "replay", "decodes", "chats", "restart"
    return run_loads(__doc__, loads, measure, usual=loads[:-1])


if __name__ == "__main__":
    sys.exit(main())
