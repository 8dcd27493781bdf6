"""What grouping pairs by expert has to give, on any device."""

from __future__ import annotations

from torch import Tensor

from megatron_hybrid.kernels.experts import pairs


def check_groups(experts: Tensor, num_experts: int, rows: int) -> None:
    """Blocks hold each row once, in order, and only rows of their expert."""
    groups = pairs.group(experts, num_experts, rows)
    ids = experts.flatten()
    here = int((ids < num_experts).sum())
    assert groups.order[:here].tolist() == ids.argsort(stable=True)[:here].tolist()
    in_order = ids[groups.order[:here].long()].tolist()
    row = 0
    for expert, begin, end in groups.blocks.t().tolist():
        assert expert < num_experts and 0 <= end - begin <= rows
        if begin < end:
            assert begin == row
            assert set(in_order[begin:end]) == {expert}
            row = end
    assert row == here
