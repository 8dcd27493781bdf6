"""BatchBuilder: the packing of a mixed step."""

from __future__ import annotations

import numpy as np
import torch

from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.plan import BlockCopy, ResumedRow, StepPlan
from megatron_hybrid.execution.rows import RowTable
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
    inputs = BatchBuilder(rows, 4, torch.device("cpu"), 64).build(plan)
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
    plan.copies = [BlockCopy(3, 5, 2), BlockCopy(3, 6, 3), BlockCopy(2, 1, 1)]
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
    inputs = BatchBuilder(RowTable(1, 1), 4, torch.device("cpu"), 64).build_dummy()
    assert inputs.decode is not None
    assert inputs.decode.read_slot.tolist() == inputs.decode.write_slot.tolist() == [0]
    assert inputs.paged.kv_slot.tolist() == [0] and inputs.paged.kv_indices.tolist() == [0]
    assert inputs.paged.kv_length.tolist() == [1] and inputs.num_tokens == 1
