"""Prompts through a whole recurrent layer, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.cases import BLOCK, Bench, Calls, Case
from bench.recurrent_kinds import RecurrentKind
from megatron_hybrid.layers.inputs import allocate_caches
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize


def layer_cases(bench: Bench, kind: RecurrentKind) -> Iterator[Case]:
    for tokens in bench.prefills()[:2]:
        yield _layer_prefill(bench, kind, tokens, 4)


def _layer_prefill(bench: Bench, kind: RecurrentKind, tokens: int, checkpoints: int) -> Case:
    """A whole layer, its projections included, with and without checkpoints; and with those,
    which are packed then."""
    config = replace(
        bench.model,
        pattern=kind.letter,
        vocab_size=32,
        tie_word_embeddings=True,
        shared_transformer=None,
    )
    with torch.device(bench.device):
        model = HybridModel(
            config, initialize(device=bench.device), bench.dtype, bench.dtype, torch.float32
        )
    for _, part in model.weight_parts():
        part.put(bench.normal(*part.target.shape).mul_(part.shape[-1] ** -0.5))
    model.after_loading()
    mixer = model.blocks[0].mixer.recurrent  # type: ignore[union-attr]
    assert isinstance(mixer, RecurrentMixer)
    found = [bench.segments([tokens], n, kind.kernel_chunk) for n in (checkpoints, 0)]
    plans = [mixer.plan(0, None, segments, bench.kernels) for segments in found]
    slots = 2 + len(found[0].checkpoint_slot)

    def make() -> Calls:
        x = bench.normal(tokens, bench.model.hidden_size)
        caches = allocate_caches(
            {}, {0: mixer.spec}, 1, BLOCK, slots, bench.device,
            num_packed=slots - 2, packed_dtype=torch.int8,
        )  # fmt: skip
        (states,) = caches.packed
        staged = found[0].checkpoint_slot
        steps = [KernelPlans(caches, bench.kernels, recurrent={mixer.kind: plan}) for plan in plans]

        def packed() -> None:
            mixer(x, steps[0])
            bench.kernels.packing.pack(states, staged, staged + slots - 2)

        return {
            "ours": lambda: mixer(x, steps[0]),
            "without": lambda: mixer(x, steps[1]),
            "packed": packed,
        }

    weights = sum(weight.numel() for weight in mixer.parameters())
    flops = 2 * weights * tokens + tokens * kind.flops_per_token
    shape = f"{kind.letter}, {tokens} tokens, {checkpoints} checkpoints"
    return Case("layer prefill", shape, weights * bench.item, make, flops, rounds=9)
