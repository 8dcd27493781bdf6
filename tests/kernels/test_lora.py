"""Adapters' products in plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.lora import reference, whole_tiles
from tests.kernels.lora_cases import check_add, check_alone, make_weights


@pytest.mark.parametrize("add", [reference.add, whole_tiles.add], ids=["reference", "whole tiles"])
@pytest.mark.parametrize("counts", [[40], [24, 8], [16, 24, 8]])
@pytest.mark.parametrize("tokens", [1, 40])
def test_equals_a_sum_token_by_token(add, counts: list[int], tokens: int) -> None:
    check_add(add, tokens, make_weights(48, counts), 1e-5)


def test_no_adapter_changes_nothing() -> None:
    check_add(reference.add, 5, make_weights(48, [40]), 1e-5, torch.zeros(5, dtype=torch.int32))


def test_bits_of_whole_tiles_do_not_depend_on_the_batch() -> None:
    check_alone(whole_tiles.add, make_weights(48, [24, 8]))
