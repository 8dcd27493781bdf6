"""Adapters' products in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid.kernels.linear import reference as linear_reference
from megatron_hybrid.kernels.linear import whole_tiles as linear_by_tiles
from megatron_hybrid.kernels.lora import reference, whole_tiles
from tests.kernels.lora_cases import (
    check_add,
    check_alone,
    check_wide,
    check_wide_alone,
    make_weights,
)


@pytest.mark.parametrize("add", [reference.add, whole_tiles.add], ids=["reference", "whole tiles"])
@pytest.mark.parametrize("counts", [[40], [24, 8], [16, 24, 8]])
@pytest.mark.parametrize("tokens", [1, 40])
def test_equals_a_sum_token_by_token(add, counts: list[int], tokens: int) -> None:
    check_add(add, tokens, make_weights(48, counts), 1e-5)


def test_no_adapter_changes_nothing() -> None:
    check_add(reference.add, 5, make_weights(48, [40]), 1e-5, torch.zeros(5, dtype=torch.int32))


def test_bits_of_whole_tiles_do_not_depend_on_the_batch() -> None:
    check_alone(whole_tiles.add, make_weights(48, [24, 8]))


@pytest.mark.parametrize(
    ("lora", "linear"),
    [(reference, linear_reference), (whole_tiles, linear_by_tiles)],
    ids=["reference", "whole tiles"],
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_wide_layers_equal_a_sum_token_by_token(lora: Any, linear: Any, tokens: int) -> None:
    for counts in ([40], [24, 24], [16, 24, 8]):
        for activation, gated in (("none", False), ("relu2", False), ("silu", True)):
            weights = make_weights(48, counts)
            check_wide(lora.multiply, linear, tokens, weights, 1e-5, activation, gated)


def test_bits_of_wide_layers_by_whole_tiles_do_not_depend_on_the_batch() -> None:
    check_wide_alone(whole_tiles.multiply, linear_by_tiles, make_weights(48, [24, 8]))
