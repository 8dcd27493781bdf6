"""What kernels of layers with a sliding window are told of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid.cache.lease import TailCopy
from megatron_hybrid.execution.batch import BatchBuilder
from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.kernels.contract import PagedSequences
from tests.execution.steps import chunk

SIZE, QUOTA = 4, 4


def table() -> RowTable:
    """Rows 0 and 1 decode, row 2 has blocks that its chunk needs, row 3 has nothing."""
    rows = RowTable(4, 8, has_window=True)
    blocks = {0: (4, [9, 3]), 1: (0, [5]), 2: (1, [6, 7, 8])}
    for row, (first, own) in blocks.items():
        rows.set_blocks(row, list(range(10 * row + 1, 10 * row + 1 + first + len(own))))
        rows.set_window(row, first, own)
    rows.position[:2] = 21, 2
    rows.last_token[:2] = 42, 43
    return rows


def plan(prefills: bool = True) -> StepPlan:
    made = StepPlan(0, np.asarray([0, 1]))
    if prefills:
        made.prefills = [chunk(2, 9, 15, write_from=12)]
    return made


def check_decodes(window: PagedSequences) -> None:
    """21 is in block 5 of its sequence, the second one that is left; 2 in the only one."""
    assert window.kv_slot[:2].tolist() == [3 * SIZE + 1, 5 * SIZE + 2]
    for figures in (window, window.host):
        assert figures.kv_length[:2].tolist() == [22 - 16, 3]
        assert figures.kv_indptr[:3].tolist() == [0, 2, 3]
        assert figures.kv_indices[:3].tolist() == [9, 3, 5]
        assert figures.last_block_length[:2].tolist() == [2, 3]


def test_sequences_begin_with_the_first_block_that_is_still_there() -> None:
    builder = BatchBuilder(table(), SIZE, torch.device("cpu"), 64, window_quota=QUOTA)
    inputs = builder.build(plan())
    window = inputs.window
    assert window is not None
    check_decodes(window)
    assert window.kv_length.tolist() == [6, 3, 15 - 4]
    assert window.kv_indices.tolist() == [9, 3, 5, 6, 7, 8]
    # all of the chunk is written: what is shared of other layers lies in other blocks
    places = [7 * SIZE + 1, 7 * SIZE + 2, 7 * SIZE + 3, 8 * SIZE, 8 * SIZE + 1, 8 * SIZE + 2]
    assert window.kv_slot[2:].tolist() == places
    assert inputs.paged.kv_slot[2:5].tolist() == [0, 0, 0]
    assert inputs.paged.kv_length.tolist() == [22, 3, 15]
    assert window.cu_seqlens.tolist() == inputs.paged.cu_seqlens.tolist() == [0, 1, 2, 8]


@pytest.mark.parametrize("prefills", [True, False])
def test_a_graphs_figures_are_filled_up_and_stay_where_they_are(prefills: bool) -> None:
    size = GraphSize(3, 10, 2) if prefills else GraphSize(3)
    rows = table()
    builder = BatchBuilder(rows, SIZE, torch.device("cpu"), 64, window_quota=QUOTA)
    dummy = builder.build_dummy(size).window
    assert dummy is not None and dummy.static
    assert dummy.kv_length.tolist() == [1] * (3 + size.prompts)
    assert not dummy.kv_slot.any() and not dummy.kv_indices.any()
    places = [getattr(dummy, n).data_ptr() for n in ("kv_length", "kv_indices", "kv_slot")]
    window = builder.build(plan(prefills), size).window
    assert window is not None
    assert [window.kv_length.data_ptr(), window.kv_indices.data_ptr()] == places[:2]
    assert window.kv_slot.data_ptr() == places[2]
    assert len(window.kv_indices) == len(dummy.kv_indices)
    check_decodes(window)
    assert window.kv_length[2] == 1 and window.kv_indices[3] == 0  # nobody decodes there
    if prefills:
        assert window.kv_length[3:].tolist() == [11, 1]
        assert window.kv_slot[3:9].tolist() == [29, 30, 31, 32, 33, 34]
        assert not window.kv_slot[9:].any()
    # a row less, and another block: nothing of the last step is left
    rows.set_window(0, 5, [3])
    rows.position[0] = 22
    later = builder.build(StepPlan(0, np.asarray([0])), size).window
    assert later is not None and later.kv_slot[:3].tolist() == [3 * SIZE + 2, 0, 0]
    assert later.kv_length.tolist() == [23 - 20] + [1] * (2 + size.prompts)


def test_a_graph_may_have_prompts_beside_as_many_decodes_as_there_can_be() -> None:
    rows = RowTable(40, 8, has_window=True)
    builder = BatchBuilder(rows, SIZE, torch.device("cpu"), 44, window_quota=300)
    window = builder.build_dummy(GraphSize(40, 4, 30)).window
    assert window is not None and len(window.kv_length) == 70


def test_tokens_of_window_blocks_are_copied_beside_others() -> None:
    builder = BatchBuilder(table(), SIZE, torch.device("cpu"), 64, window_quota=QUOTA)
    step = plan()
    step.copies = [TailCopy(3, 4, 2)]
    step.window_copies = [TailCopy(7, 6, 3), TailCopy(1, 2, 1)]
    moves = builder.build(step).moves
    assert moves is not None
    assert moves.copy_source.tolist() == [12, 13] and moves.copy_destination.tolist() == [16, 17]
    assert moves.window_source.tolist() == [28, 29, 30, 4]
    assert moves.window_destination.tolist() == [24, 25, 26, 8]


def test_without_windows_there_is_nothing_of_them() -> None:
    rows = RowTable(4, 8)
    inputs = BatchBuilder(rows, SIZE, torch.device("cpu"), 64).build(StepPlan(0, np.asarray([0])))
    assert rows.window_table is None and inputs.window is None
