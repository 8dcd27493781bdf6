"""Many simulations: every policy on every trace at every pool size, each at its best split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

from simulation.driver import Simulation, SimulationResult
from simulation.host import with_host_memory
from simulation.oracle import Oracle
from simulation.policies import POLICIES, WORKING_SET_POLICY
from simulation.pools import SHAPES, divide_pool, unlimited_pool
from simulation.sessions import Trace
from simulation.traces import make_trace, play


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and the model that it is sent to."""

    trace: str
    requests: int
    seed: int
    shape: str = "nemotron-h-8b"
    measure_bounds: bool = True  # the oracle and the working set


@dataclass(frozen=True, slots=True)
class Reference:
    """What a workload's results are measured by."""

    workload: Workload
    prompt_tokens: int
    output_tokens: int
    sequences: int
    oracle_tokens: int | None  # that an unlimited, token-granular cache would skip
    unlimited: SimulationResult | None  # our policy's with unlimited memory, if it was asked for

    @property
    def oracle_share(self) -> float | None:
        return None if self.oracle_tokens is None else self.oracle_tokens / self.prompt_tokens

    @property
    def working_set(self) -> int:
        """Bytes that our policy holds at the end, with unlimited memory; 0 if not measured."""
        return 0 if self.unlimited is None else self.unlimited.held_bytes


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """How much memory there is."""

    bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation to run."""

    workload: Workload
    policy: str
    pool: Pool
    split: float  # of the pool, for cached states
    build: int = 0  # which of the policy's candidates
    host: float = 0.0  # memory behind the pool, by the pool's size

    @property
    def name(self) -> str:
        """Of a row in a table."""
        return f"{self.policy}, host x{self.host:g}" if self.host else self.policy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a cell; `result` is None when the pool is too small for one request."""

    cell: Cell
    result: SimulationResult | None
    cache_entries: int = 0  # blocks and states that the pool has room for

    @property
    def skipped_share(self) -> float:
        return 0.0 if self.result is None else self.result.skipped_share


def measure_reference(workload: Workload) -> Reference:
    """What a workload consists of and, if it asks for them, the oracle's share and the working set.

    Both need memory for everything that the trace ever computes.
    """
    oracle = Oracle() if workload.measure_bounds else None
    prompts = known = outputs = sequences = 0
    for request in play(_trace(workload)):
        prompts += request.prompt_tokens
        outputs += sum(map(len, request.answers))
        sequences += request.n
        if oracle is not None:
            known += oracle.admit(request.parts, request.answers)
    if oracle is None:
        return Reference(workload, prompts, outputs, sequences, None, None)
    # Everything that is computed once, and for each sequence what doesn't fill a block.
    blocks = (prompts - known + outputs) // 64 + 8 * sequences
    slots = 6 * sequences + (prompts - known) // 512
    unlimited = _run_unlimited(workload, blocks, slots)
    return Reference(workload, prompts, outputs, sequences, known, unlimited)


def _run_unlimited(workload: Workload, blocks: int, slots: int) -> SimulationResult:
    """Our policy in a pool that turns out to be large enough; begins with a guess."""
    shape = SHAPES[workload.shape]
    while True:
        geometry = unlimited_pool(shape, blocks, slots)
        cache = POLICIES[WORKING_SET_POLICY].builds[0](geometry, shape)
        result = Simulation(_trace(workload), cache).run()
        if result.kv_evictions == result.state_evictions == result.checkpoints_skipped == 0:
            return result
        blocks, slots = 2 * blocks, 2 * slots


def run_cell(cell: Cell) -> Outcome:
    """Run one simulation."""
    shape, policy = SHAPES[cell.workload.shape], POLICIES[cell.policy]
    try:
        geometry = divide_pool(shape, cell.pool.bytes, cell.split, cached_dtype=policy.cached_dtype)
    except ValueError:
        return Outcome(cell, None)
    cache = policy.builds[cell.build](geometry, shape)
    host_bytes = int(cell.pool.bytes * cell.host)
    transfers = with_host_memory(cache, host_bytes, shape) if host_bytes else None
    trace = _trace(cell.workload)
    result = Simulation(trace, cache, twins=policy.twins, transfers=transfers).run()
    return Outcome(cell, result, geometry.num_blocks + geometry.num_cached_slots)


def cells(
    reference: Reference,
    policies: Iterable[str],
    pools: Sequence[Pool],
    splits: Sequence[float],
    hosts: Sequence[float] = (0.0,),
) -> list[Cell]:
    """The simulations that a workload's table needs."""
    return [
        Cell(reference.workload, policy, pool, split, build, host)
        for policy in policies
        for host in hosts
        for pool in pools
        for split in splits
        for build in range(len(POLICIES[policy].builds))
    ]


def run_all(work: Sequence[Workload | Cell], workers: int = 1) -> Iterator[Reference | Outcome]:
    """Measure references or run cells, in their order, on so many processes."""
    if workers == 1:
        yield from map(_run, work)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_run, work)


def best_splits(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Each policy at the split and candidate at which it skips most, in order of appearance."""
    best: dict[Cell, Outcome] = {}
    for outcome in outcomes:
        key = replace(outcome.cell, split=0.0, build=0)
        if key not in best or outcome.skipped_share > best[key].skipped_share:
            best[key] = outcome
    return list(best.values())


def _run(work: Workload | Cell) -> Reference | Outcome:
    return run_cell(work) if isinstance(work, Cell) else measure_reference(work)


def _trace(workload: Workload) -> Trace:
    return make_trace(workload.trace, workload.requests, workload.seed)
