"""Steps of CUDA graphs whose tokens have adapters: test_graph_steps.py's imitation."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.layers.adapters import AdapterSlots
from megatron_hybrid.parallel import ParallelContext
from tests.execution.steps import chunk
from tests.execution.test_graph_steps import SMALL, Both
from tests.models.conftest import TinyModel, random_tokens

SIZES = [GraphSize(4), GraphSize(4, adapters=1), GraphSize(4, 48, 3, 6, adapters=1)]


def test_padded_steps_read_each_tokens_adapter(tmp_path: Any, parallel: ParallelContext) -> None:
    """Of experts, too; the tensors of a step hold the slots of the step before."""
    model = copy.copy(
        TinyModel("nemotron_h_moe", tmp_path, parallel, **SMALL["nemotron_h_moe"]).ours
    )
    slots = model.adapters = AdapterSlots(model.adapted_parts(experts=True), 3, 4, "cpu")
    generator = torch.Generator().manual_seed(1)
    for weights in slots._weights.values():
        for values in (weights.a, weights.b):
            values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    tiny: Any = SimpleNamespace(ours=model)
    both = Both(tiny, parallel, SIZES)
    prompt, other = random_tokens(30), random_tokens(9, seed=1)
    for row, adapter in enumerate((1, 0, 3)):
        both.row(row, [8 + 4 * row, 9 + 4 * row, 10 + 4 * row])
        both.plain.rows.adapter[row] = both.padded.rows.adapter[row] = adapter
    both.step(SIZES[2], prefills=[chunk(0, 0, 30, prompt=prompt), chunk(1, 0, 9, prompt=other)])
    both.step(SIZES[2], decodes=[0, 1], prefills=[chunk(2, 0, 30, prompt=prompt)])
    both.step(SIZES[1], decodes=[0, 1, 2])
    both.plain.rows.adapter[:] = both.padded.rows.adapter[:] = 0
    both.step(SIZES[0], decodes=[0, 1, 2])
    both.plain.rows.adapter[1] = both.padded.rows.adapter[1] = 2
    both.step(SIZES[1], decodes=[1])
    without = both.plain.runner._batch_builder.build_dummy(SIZES[0])
    assert without.adapters is None
