"""BatchBuilder: the packing of a mixed step."""

from __future__ import annotations

import numpy as np
import torch

from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable


def chunk(row: int, start: int, end: int, **changes) -> PrefillChunk:  # type: ignore[no-untyped-def]
    values = {
        "row": row, "owner": None, "tokens": np.arange(start, end, dtype=np.int32) + 100,
        "start": start, "end": end, "write_from": 0, "read_slot": 0, "write_slot": row + 1,
        "checkpoints": (), "samples": True, "logprob_targets": None, "num_top_logprobs": 0,
    }  # fmt: skip
    return PrefillChunk(**(values | changes))


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
    inputs = BatchBuilder(rows, 4, torch.device("cpu")).build(plan)
    assert inputs.num_tokens == 10 and inputs.num_decodes == 1
    assert inputs.token_ids.tolist() == [42, 100, 101, 102, 104, 105, 106, 107, 108, 109]
    assert inputs.positions.tolist() == [6, 0, 1, 2, 4, 5, 6, 7, 8, 9]
    paged = inputs.paged
    assert paged.cu_seqlens.tolist() == [0, 1, 4, 10]
    assert paged.kv_length.tolist() == [7, 3, 10]
    assert paged.block_table.tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 10]]
    # positions 4 to 7 of the last one are shared: their writes go to the dummy block
    assert paged.kv_slot.tolist() == [26, 28, 29, 30, 0, 0, 0, 0, 40, 41]
    assert inputs.decode is not None and inputs.prefill is not None
    assert inputs.decode.read_slot.tolist() == [9] and inputs.decode.write_slot.tolist() == [3]
    prefill = inputs.prefill
    assert prefill.cu_seqlens.tolist() == [0, 3, 9] and prefill.longest == 6
    assert prefill.start_position.tolist() == [0, 4]
    assert prefill.read_slot.tolist() == [0, 11] and prefill.write_slot.tolist() == [2, 3]
    assert prefill.checkpoint_sequence.tolist() == [1]
    assert prefill.checkpoint_position.tolist() == [8]
    assert prefill.checkpoint_slot.tolist() == [12]
    assert inputs.logits_index.tolist() == [0, 9]


def test_prompt_logprobs_ask_for_every_position_after_the_sampled_ones():
    rows = RowTable(2, 4)
    rows.set_blocks(0, [1])
    rows.set_blocks(1, [2])
    plan = StepPlan(0, np.asarray([], dtype=np.int64))
    plan.prefills = [chunk(0, 0, 3, logprob_targets=np.asarray([1, 2])), chunk(1, 0, 2)]
    inputs = BatchBuilder(rows, 4, torch.device("cpu")).build(plan)
    assert inputs.decode is None
    assert inputs.logits_index.tolist() == [2, 4, 0, 1]


def test_the_dummy_step_touches_only_the_null_slot_and_the_dummy_block():
    inputs = BatchBuilder(RowTable(1, 1), 4, torch.device("cpu")).build_dummy()
    assert inputs.decode is not None
    assert inputs.decode.read_slot.tolist() == inputs.decode.write_slot.tolist() == [0]
    assert inputs.paged.kv_slot.tolist() == [0] and inputs.paged.block_table.tolist() == [[0]]
    assert inputs.paged.kv_length.tolist() == [1] and inputs.num_tokens == 1
