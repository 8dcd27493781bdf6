"""What holds of an engine between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid.cache.lease import Pin
from megatron_hybrid.engine.context import DynamicInferenceContext


def check_integrity(
    context: DynamicInferenceContext, pins: Iterable[Pin] = (), reserved: Iterable[int] = ()
) -> None:
    """Assert every invariant of the cache and the rows; call between steps. `pins`, `reserved`:
    those that the scheduler has, and the slots that it has reserved."""
    everybody, rows = list(context.running()), context.rows
    assert len(everybody) == context.geometry.max_requests - rows.num_free
    context.transfers.check_integrity()
    pins, reserved = [*pins, *context.transfers.pins()], [*reserved, *context.transfers.slots()]
    context.cache.check_integrity([running.lease for running in everybody], pins, reserved)
    for running in everybody:
        row, lease = running.row, running.lease
        assert context.running_in(row) is running
        table = rows.block_table[row, : len(lease.blocks)]
        assert table.tolist() == lease.blocks, "a row's block table differs from its lease"
        if context.geometry.has_attention:
            assert rows.num_blocks[row] == len(lease.blocks)
        if lease.window is not None:
            assert rows.window_table is not None
            first, end = lease.window.first, lease.window.end
            assert rows.window_first[row] == first
            assert rows.window_table[row, first:end].tolist() == lease.window.blocks
        if rows.decoding[row]:
            slots = rows.read_slot[row], rows.write_slot[row]
            assert slots == (lease.read_slot, lease.write_slot), "a row has its lease's slots"
