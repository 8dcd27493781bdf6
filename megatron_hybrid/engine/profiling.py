"""The memory that a step takes besides weights and caches, measured on the device; what it launches
is compiled before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.kernels.compile_ahead import compiling_ahead
from megatron_hybrid.kernels.compiled import KERNELS
from megatron_hybrid.layers.inputs import RoutedSpec, allocate_caches
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from megatron_hybrid.request import SamplingParams


def measure_activations(
    model: HybridModel,
    parallel: ParallelContext,
    device: torch.device,
    *,
    block_size: int,
    max_requests: int,
    max_tokens: int,
    max_seq_length: int,
    ring_length: int = 0,
    routed: RoutedSpec | None = None,
    when_compiled: Callable[[], None] = lambda: None,
) -> int:
    """Bytes on a CUDA device, at the peak of the largest step, on caches just large enough, besides
    what kernels keep from now on, such as workspaces: the device has that less already. Every rank
    calls it: on a pipeline's stages the step takes its course. `ring_length`: of caches without
    which the kernels have no decodes; 0: they have. `routed`: of allocate_caches. `when_compiled`:
    called when the step's kernels are.

    Prompts' log-probabilities are not in it: their logits alone can take gigabytes.
    """
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(device)
    rows, plan = largest_step(
        block_size=block_size,
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_seq_length=max_seq_length,
        adapters=model.adapters is not None,
    )
    caches = allocate_caches(
        model.kv_specs,
        model.state_specs,
        num_blocks=int(rows.block_table.max()) + 1,
        block_size=block_size,
        num_slots=len(plan.prefills) + 1,
        device=device,
        num_rings=len(rows.decoding) if ring_length else 0,
        ring_length=ring_length,
        routed=routed,
    )
    with_caches = torch.cuda.memory_allocated(device)
    runner = ModelRunner(  # with what it keeps between steps: the one that stays has it too
        model, caches, rows, block_size, device, parallel, max_tokens=max_tokens, asynchronous=False
    )
    _compile_kernels(runner, plan, parallel, device)
    when_compiled()
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(plan)
    peak = torch.cuda.max_memory_allocated(device) - with_caches
    del runner, caches
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_allocated(device) - allocated
    return peak - kept


def _compile_kernels(
    runner: ModelRunner, plan: StepPlan, parallel: ParallelContext, device: torch.device
) -> None:
    """Of this step and smaller ones, unless a small one's are in Triton's cache: then the others
    will be, too, and to go through a step for each costs more than to read them when they are
    needed."""
    before = KERNELS.compiled
    with compiling_ahead(device):
        runner.dummy_forward()
    if had_to_compile(before, parallel):
        with compiling_ahead(device):
            for step in (plan, *smaller_steps(plan)):
                runner.execute(step)
    torch.cuda.synchronize(device)


def had_to_compile(before: int, parallel: ParallelContext) -> bool:
    """Whether any rank has compiled more than the `before` kernels of this process."""
    return parallel.lockstep.minimum(int(KERNELS.compiled == before)) == 0


def largest_step(
    *,
    block_size: int,
    max_requests: int,
    max_tokens: int,
    max_seq_length: int,
    adapters: bool = False,
) -> tuple[RowTable, StepPlan]:
    """A step of `max_tokens` tokens that samples, with every filter and penalty, for as many rows
    as there can be. Prompts are as long as can be; decodes read slot 0 and write nowhere. But
    where there are three, the first two have no filters, the first and third no penalties: other
    kernels draw for them. `adapters`: all tokens have one."""
    prompts = min(-(-max_tokens // max_seq_length), max_requests)
    decodes = min(max_requests - prompts, max_tokens - prompts)
    rows = RowTable(prompts + decodes, -(-max_seq_length // block_size))
    rows.temperature[:], rows.top_k[:], rows.top_p[:], rows.min_p[:] = 1.0, 50, 0.9, 0.01
    params = SamplingParams(presence_penalty=0.1, repetition_penalty=1.1)
    penalised = set(range(prompts + decodes))
    if decodes >= 3:
        rows.top_k[:2], rows.top_p[:2], rows.min_p[:2] = 0, 1.0, 0.0
        penalised -= {0, 2}
    for row in penalised:  # what penalties are counted in is made when first needed
        rows.adjust(row, params, np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32))
    chunks: list[PrefillChunk] = []
    left, next_block = max_tokens - decodes, 1
    for row in range(decodes, decodes + prompts):
        others = decodes + prompts - row - 1
        length = min(max_seq_length, left - others)
        blocks = list(range(next_block, next_block - (-length // block_size)))
        rows.set_blocks(row, blocks)
        chunks.append(
            PrefillChunk(
                row=row,
                owner=None,
                tokens=np.zeros(length, dtype=np.int32),
                start=0,
                end=length,
                write_from=0,
                read_slot=0,
                write_slot=len(chunks) + 1,
                checkpoints=(),
                samples=True,
                logprob_targets=None,
                num_top_logprobs=0,
            )
        )
        left, next_block = left - length, blocks[-1] + 1
    decode_rows = np.arange(decodes, dtype=np.int64)
    rows.adapter[:] = int(adapters)
    plan = StepPlan(step=0, decode_rows=decode_rows, prefills=chunks, adapters=adapters)
    return rows, plan


_FEWEST_TOKENS = 16
_MANY_PROMPTS = 16


def smaller_steps(plan: StepPlan) -> Iterator[StepPlan]:
    """Steps whose kernels may be others than those of `plan`, the largest step: kernels choose
    tiles by how many tokens and prompts there are. They are there to be compiled for: prompts share
    a row."""
    if len(plan.decode_rows) >= 3:
        yield replace(plan, decode_rows=plan.decode_rows[:2], prefills=[])  # without filters
    yield _of_size(plan, 1, 1)
    tokens = len(plan.decode_rows) + plan.num_prefill_tokens
    yield _of_size(plan, tokens, _MANY_PROMPTS)
    while tokens >= 2 * _FEWEST_TOKENS:
        for fewer in (tokens * 3 // 4, tokens // 2):
            yield _of_size(plan, fewer, len(plan.prefills))
        tokens //= 2


def _of_size(plan: StepPlan, tokens: int, prompts: int) -> StepPlan:
    """A step of at most so many tokens, at most half of them decodes, and of no more requests than
    `plan` has."""
    requests = len(plan.decode_rows) + len(plan.prefills)
    prompts = max(min(prompts, requests, tokens // 2), 1)
    decode_rows = plan.decode_rows[: min(requests - prompts, tokens // 2)]
    prompt = plan.prefills[0]
    length = min((tokens - len(decode_rows)) // prompts, prompt.length)
    prompt = prompt._replace(tokens=prompt.tokens[:length], end=length)
    return replace(plan, decode_rows=decode_rows, prefills=[prompt] * prompts)
