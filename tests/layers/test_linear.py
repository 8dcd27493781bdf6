"""Linear layers of one rank of several."""

from __future__ import annotations

import inspect

from megatron_hybrid.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear


def products(layer: type[Linear]) -> set[str]:
    """The names of what computes something."""
    functions = inspect.getmembers(layer, inspect.isfunction)
    return {
        name
        for name, function in functions
        if "kernels" in inspect.signature(function).parameters and not name.startswith("_")
    }


def test_a_part_of_a_sum_is_not_gone_on_with() -> None:
    assert products(RowParallelLinear) == {"forward"}
    assert products(ColumnParallelLinear) == {"forward", "activated", "split", "rows"}
