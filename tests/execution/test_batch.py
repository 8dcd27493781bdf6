"""BatchBuilder: the packing of a mixed step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid.cache.lease import TailCopy
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.graph_decodes import GraphDecodes
from megatron_hybrid.execution.plan import ResumedRow, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.layers.inputs import StepInputs
from tests.execution.steps import chunk


def test_a_mixed_step_is_packed_decodes_first():
    rows = RowTable(4, 8)
    rows.set_blocks(0, [5, 6])
    rows.set_blocks(1, [7])
    rows.set_blocks(2, [8, 9, 10])
    rows.position[0], rows.last_token[0] = 6, 42
    rows.read_slot[0], rows.write_slot[0] = 9, 3
    plan = StepPlan(0, np.asarray([0]))
    plan.prefills = [
        chunk(1, 0, 3, samples=False),
        chunk(2, 4, 10, write_from=8, read_slot=11, checkpoints=((8, 12),)),
    ]
    inputs = BatchBuilder(rows, 4, torch.device("cpu"), 64, [4]).build(plan)
    assert inputs.num_tokens == 10 and inputs.num_decodes == 1
    assert inputs.token_ids.tolist() == [42, 100, 101, 102, 104, 105, 106, 107, 108, 109]
    assert inputs.positions.tolist() == [6, 0, 1, 2, 4, 5, 6, 7, 8, 9]
    paged = inputs.paged
    assert paged.cu_seqlens.tolist() == [0, 1, 4, 10]
    assert paged.kv_length.tolist() == [7, 3, 10]
    assert paged.kv_indptr.tolist() == [0, 2, 3, 6]
    assert paged.kv_indices.tolist() == [5, 6, 7, 8, 9, 10]
    assert paged.last_block_length.tolist() == [3, 3, 2]
    assert all(
        on_device.tolist() == on_host.tolist()
        for on_device, on_host in (
            (paged.cu_seqlens, paged.host.cu_seqlens),
            (paged.kv_length, paged.host.kv_length),
            (paged.kv_indices, paged.host.kv_indices),
        )
    )
    # positions 4 to 7 of the last one are shared: their writes go to the dummy block
    assert paged.kv_slot.tolist() == [26, 28, 29, 30, 0, 0, 0, 0, 40, 41]
    assert inputs.decode is not None and inputs.prefill is not None
    assert inputs.decode.read_slot.tolist() == [9] and inputs.decode.write_slot.tolist() == [3]
    prefill = inputs.prefill
    assert prefill.cu_seqlens.tolist() == [0, 3, 9] and prefill.longest == 6
    assert prefill.start_position.tolist() == [0, 4]
    # chunks of 4 positions: 0-2 | 4-7, 8-9, and empty ones behind
    assert prefill.cu_chunk_seqlens[4].tolist() == [0, 3, 7, 9, 9, 9, 9]
    assert prefill.read_slot.tolist() == [0, 11] and prefill.write_slot.tolist() == [2, 3]
    assert prefill.sequence_of_token.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert prefill.cu_checkpoints.tolist() == [0, 0, 1]
    assert prefill.checkpoint_sequence.tolist() == [1]
    assert prefill.checkpoint_position.tolist() == [8]
    assert prefill.checkpoint_slot.tolist() == [12]
    assert inputs.logits_index.tolist() == [0, 9]
    assert inputs.moves is None


def test_prompt_logprobs_ask_for_every_position_after_the_sampled_ones():
    rows = RowTable(2, 4)
    rows.set_blocks(0, [1])
    rows.set_blocks(1, [2])
    plan = StepPlan(0, np.asarray([], dtype=np.int64))
    plan.prefills = [chunk(0, 0, 3, logprob_targets=np.asarray([1, 2])), chunk(1, 0, 2)]
    inputs = BatchBuilder(rows, 4, torch.device("cpu"), 64).build(plan)
    assert inputs.decode is None
    assert inputs.logits_index.tolist() == [2, 4, 0, 1]


def test_cache_moves_name_places_rows_and_slots():
    rows = RowTable(8, 4)
    plan = StepPlan(0, np.asarray([0, 1]))
    plan.prefills = [
        chunk(2, 0, 3, samples=False),
        chunk(3, 0, 3),
        chunk(4, 0, 3, logits_slot=7, logprob_targets=np.asarray([1, 2])),
    ]
    plan.resumed = [ResumedRow(5, None, 9), ResumedRow(6, None, 9)]
    plan.copies = [TailCopy(3, 5, 2), TailCopy(3, 6, 3), TailCopy(2, 1, 1)]
    inputs = BatchBuilder(rows, 4, torch.device("cpu"), 64).build(plan)
    moves = inputs.moves
    assert moves is not None
    assert moves.copy_source.tolist() == [12, 13, 12, 13, 14, 8]
    assert moves.copy_destination.tolist() == [20, 21, 24, 25, 26, 4]
    # logits: decodes, ends of rows 3 and 4, then the prompt log-probabilities
    assert moves.stored_rows.tolist() == [3] and moves.stored_slots.tolist() == [7]
    assert moves.resumed_slots.tolist() == [9, 9]
    assert inputs.logits_index.tolist() == [0, 1, 7, 10, 8, 9]


def test_a_step_of_resumed_rows_has_no_tokens():
    plan = StepPlan(0, np.asarray([], dtype=np.int64), resumed=[ResumedRow(1, None, 2)])
    inputs = BatchBuilder(RowTable(2, 2), 4, torch.device("cpu"), 64).build(plan)
    assert inputs.num_tokens == 0 and inputs.decode is None and inputs.prefill is None
    assert inputs.moves is not None and inputs.moves.resumed_slots.tolist() == [2]


def test_the_dummy_step_touches_only_the_null_slot_and_the_dummy_block():
    builder = BatchBuilder(RowTable(1, 1), 4, torch.device("cpu"), 64)
    inputs = builder.build_dummy(GraphSize(1))
    assert inputs.decode is not None
    assert inputs.decode.read_slot.tolist() == inputs.decode.write_slot.tolist() == [0]
    assert inputs.paged.kv_slot.tolist() == [0] and inputs.paged.kv_indices[0] == 0
    assert inputs.paged.kv_length.tolist() == [1] and inputs.num_tokens == 1
    assert inputs.prefill is None


SIZE = GraphSize(4, 16, 3, 5)


def mixed_table() -> RowTable:
    rows = RowTable(6, 8)
    rows.set_blocks(0, [5, 6])
    rows.set_blocks(1, [7])
    rows.set_blocks(2, [8, 9, 10])
    rows.set_blocks(3, [11])
    rows.position[0], rows.last_token[0] = 6, 42
    rows.position[3], rows.last_token[3] = 2, 43
    rows.read_slot[[0, 3]], rows.write_slot[[0, 3]] = [9, 8], [3, 5]
    return rows


def mixed_plan() -> StepPlan:
    plan = StepPlan(0, np.asarray([0, 3]))
    plan.prefills = [
        chunk(1, 0, 3, samples=False),
        chunk(2, 4, 10, write_from=8, read_slot=11, checkpoints=((8, 12),), logits_slot=7),
    ]
    return plan


def test_a_mixed_step_is_filled_up_to_the_size_of_its_graph():
    inputs = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64).build(mixed_plan(), SIZE)
    assert inputs.num_tokens == 20 and inputs.num_decodes == 4
    prompts = [100, 101, 102, 104, 105, 106, 107, 108, 109]
    assert inputs.token_ids.tolist() == [42, 43, 0, 0, *prompts, *[0] * 7]
    assert inputs.positions.tolist() == [6, 2, 0, 0, 0, 1, 2, 4, 5, 6, 7, 8, 9, *[0] * 7]
    paged = inputs.paged
    assert paged.static and paged.num_decodes == 4
    assert paged.kv_slot.tolist() == [26, 46, 0, 0, 28, 29, 30, 0, 0, 0, 0, 40, 41, *[0] * 7]
    # padded decodes have a token, padded prompts have none; both have one of KV, in block 0
    assert paged.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 7, 13, 13]
    assert paged.kv_length.tolist() == [7, 3, 1, 1, 3, 10, 1]
    assert paged.kv_indptr.tolist() == [0, 2, 3, 4, 5, 6, 9, 10]
    assert paged.kv_indices[:10].tolist() == [5, 6, 11, 0, 0, 7, 8, 9, 10, 0]
    assert paged.last_block_length.tolist() == [3, 3, 1, 1, 3, 2, 1]
    assert paged.host.kv_indices.tolist() == paged.kv_indices[:10].tolist()
    assert paged.host.cu_seqlens.tolist() == paged.cu_seqlens.tolist()
    assert inputs.decode is not None and inputs.prefill is not None
    assert inputs.decode.read_slot.tolist() == [9, 8, 0, 0]
    assert inputs.decode.write_slot.tolist() == [3, 5, 0, 0]
    assert inputs.decode_rows.tolist() == [0, 3, 0, 0]
    prefill = inputs.prefill
    assert prefill.cu_seqlens.tolist() == [0, 3, 9, 9]
    assert prefill.longest == 16  # of any step that the graph may run
    assert prefill.start_position.tolist() == [0, 4, 0]
    assert prefill.read_slot.tolist() == [0, 11, 0] and prefill.write_slot.tolist() == [2, 3, 0]
    assert prefill.sequence_of_token.tolist() == [0] * 3 + [1] * 6 + [-1] * 7
    assert prefill.cu_checkpoints.tolist() == [0, 0, 1, 1]
    assert prefill.checkpoint_sequence.tolist() == [1, 0, 0, 0, 0]
    assert prefill.checkpoint_position.tolist() == [8, 0, 0, 0, 0]
    assert prefill.checkpoint_slot.tolist() == [12, 0, 0, 0, 0]
    assert prefill.checkpoints() == [(1, 8, 12)]
    # the rows that sample come first: two decodes and the end of the second prompt
    assert inputs.logits_index.tolist() == [0, 1, 12, 0, 0, 0, 0]
    assert inputs.sampled_rows.tolist() == [0, 3, 2]
    assert inputs.moves is not None
    assert inputs.moves.stored_rows.tolist() == [2] and inputs.moves.stored_slots.tolist() == [7]


def tensors_of(inputs: StepInputs) -> dict[str, torch.Tensor]:
    """What a graph reads."""
    assert inputs.decode is not None and inputs.prefill is not None
    parts = (inputs, inputs.paged, inputs.decode, inputs.prefill)
    return {
        field.name: value
        for part in parts
        for field in dataclasses.fields(part)
        if isinstance(value := getattr(part, field.name), torch.Tensor)
        and field.name != "sampled_rows"
    }


def test_what_a_graph_reads_stays_where_it_is():
    """Whatever the step moves, and however many blocks, prompts and checkpoints it has."""
    builder = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64)
    dummy = tensors_of(builder.build_dummy(SIZE))
    plan = mixed_plan()
    plan.copies = [TailCopy(3, 5, 3), TailCopy(3, 6, 3)]
    plan.resumed = [ResumedRow(4, None, 9), ResumedRow(5, None, 9)]
    few = StepPlan(0, np.asarray([], dtype=np.int64), prefills=[chunk(1, 0, 1)])
    for step in (plan, mixed_plan(), few):
        found = tensors_of(builder.build(step, SIZE))
        assert {name: (t.data_ptr(), t.shape) for name, t in found.items()} == {
            name: (t.data_ptr(), t.shape) for name, t in dummy.items()
        }
    origin = dummy["token_ids"].data_ptr()
    assert len({t.data_ptr() for t in dummy.values()}) == len(dummy)
    assert all((t.data_ptr() - origin) % 16 == 0 for t in dummy.values())
    # behind the last part is room for as many blocks as all requests can have
    assert len(dummy["kv_indices"]) >= 6 * 8 + SIZE.rows


def test_the_moves_of_a_padded_step_are_those_of_the_step():
    builder = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64)
    plan = mixed_plan()
    plan.copies = [TailCopy(3, 5, 2), TailCopy(3, 6, 3), TailCopy(2, 1, 1)]
    plan.resumed = [ResumedRow(4, None, 9), ResumedRow(5, None, 9)]
    inputs = builder.build(plan, SIZE)
    moves = inputs.moves
    assert moves is not None
    assert moves.copy_source.tolist() == [12, 13, 12, 13, 14, 8]
    assert moves.copy_destination.tolist() == [20, 21, 24, 25, 26, 4]
    assert moves.stored_rows.tolist() == [2] and moves.stored_slots.tolist() == [7]
    assert moves.resumed_slots.tolist() == [9, 9]
    assert inputs.sampled_rows.tolist() == [0, 3, 2, 4, 5]


def test_decodes_alone_are_filled_up():
    plan = StepPlan(0, np.asarray([3]))
    inputs = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64).build(plan, GraphSize(3))
    assert inputs.token_ids.tolist() == [43, 0, 0] and inputs.positions.tolist() == [2, 0, 0]
    assert inputs.paged.kv_slot.tolist() == [46, 0, 0]
    assert inputs.paged.kv_indices[:3].tolist() == [11, 0, 0]
    assert inputs.paged.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert inputs.logits_index.tolist() == [0, 1, 2] and inputs.sampled_rows.tolist() == [3]
    assert inputs.prefill is None and inputs.decode is not None


def test_steps_of_decodes_alone_are_what_is_built_for_any_step(monkeypatch: pytest.MonkeyPatch):
    """Whatever the step before was, in the same places; kernels are given slots or runs."""
    random = np.random.default_rng(0)
    for as_runs in (False, True):
        rows = RowTable(6, 8)
        options: dict[str, Any] = {"as_runs": as_runs, "write_interval": 4 if as_runs else 1}
        builder = BatchBuilder(rows, 4, torch.device("cpu"), 64, **options)
        for step in range(60):
            rows.block_table[:] = random.integers(1, 50, rows.block_table.shape)
            for column in (rows.position, rows.last_token, rows.read_slot, rows.write_slot):
                column[:] = random.integers(0, 32, 6)
            rows.unfolded[:] = random.integers(0, 4, 6)
            decodes = np.flatnonzero(random.random(6) < 0.5)[:5]
            plan = StepPlan(step, decodes)
            if step % 2:
                plan.writes = random.random(len(decodes)) < 0.5
            size = GraphSize(5) if step % 7 else GraphSize(6)
            found = seen(builder.build(plan, size), len(decodes))
            with monkeypatch.context() as patch:
                patch.setattr(GraphDecodes, "can_build", lambda plan, size: False)
                expected = seen(builder.build(plan, size), len(decodes))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == value, (name, step)


def seen(inputs: StepInputs, count: int) -> dict[str, Any]:
    """All that kernels may see of a step with so many decodes, and where it lies."""
    blocks = int(inputs.paged.host.kv_indptr[-1])
    figures: dict[str, Any] = {}
    for part in (inputs, inputs.paged, inputs.decode):
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            value, name = getattr(part, field.name), f"{type(part).__name__}.{field.name}"
            if field.name == "logits_index":
                figures[name] = value[:count].tolist(), value.data_ptr(), value.shape
            elif field.name == "sampled_rows":
                figures[name] = value.tolist()
            elif isinstance(value, torch.Tensor):
                own = value[:blocks] if field.name == "kv_indices" else value
                figures[name] = own.tolist(), value.data_ptr(), value.shape
            elif not dataclasses.is_dataclass(value) and field.name != "host":
                figures[name] = value
    for name, array in inputs.paged.host._asdict().items():
        figures[name] = array.tolist(), array.dtype
    return figures


def test_steps_that_move_something_are_built_as_others_are():
    builder = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64)
    plan = StepPlan(0, np.asarray([3]))
    plan.copies = [TailCopy(3, 5, 2)]
    moves = builder.build(plan, GraphSize(2)).moves
    assert moves is not None and moves.copy_source.tolist() == [12, 13]


def test_prompts_alone_have_no_decodes():
    plan = StepPlan(0, np.asarray([], dtype=np.int64), prefills=[chunk(1, 0, 3)])
    size = GraphSize(0, 4, 2, 4)
    inputs = BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64).build(plan, size)
    assert inputs.decode is None and inputs.prefill is not None and inputs.num_decodes == 0
    assert inputs.prefill.cu_seqlens.tolist() == [0, 3, 3]
    assert inputs.logits_index.tolist() == [2, 0]


@pytest.mark.parametrize(
    "size",
    [GraphSize(1, 16, 2, 1), GraphSize(2, 8, 2, 1), GraphSize(2, 9, 1, 1), GraphSize(2, 9, 2)],
)
def test_a_step_must_fit(size: GraphSize):
    with pytest.raises(AssertionError):
        BatchBuilder(mixed_table(), 4, torch.device("cpu"), 64).build(mixed_plan(), size)
