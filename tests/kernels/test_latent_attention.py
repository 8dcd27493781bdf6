from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels.latent_attention import by_key_tiles, reference
from megatron_hybrid.kernels.rope import reference as rope
from tests.kernels.latent_cases import (
    FP8,
    MIXED,
    check,
    check_bits,
    check_first_position,
    check_masked_writes,
    latent_shape,
)

BOTH = pytest.mark.parametrize("attention", [reference, by_key_tiles])


@BOTH
def test_decodes_and_prompts_mix(attention: Any) -> None:
    check(attention, rope, MIXED, decodes=3)
    check(attention, rope, [(1, 3), (130, 131), (7, 7)])


@BOTH
@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_lie_side_by_side_or_half_apart(attention: Any, interleaved: bool) -> None:
    check(attention, rope, MIXED, interleaved=interleaved)


@BOTH
def test_positions_may_rotate_nothing(attention: Any) -> None:
    check(attention, rope, MIXED, turns=False)


@BOTH
@pytest.mark.parametrize(
    ("heads", "latent", "turned"), [(1, 8, 2), (3, 24, 4), (5, 20, 16), (3, 16, 0)]
)
def test_heads_and_latents_of_any_size(
    attention: Any, heads: int, latent: int, turned: int
) -> None:
    shape = latent_shape(heads, latent, turned, block_size=5)
    check(attention, rope, [(1, 6), (3, 8), (5, 5)], shape, nope=7, v_dim=9, turns=turned > 0)


def test_heads_may_be_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_NUMBERS", 3000)
    check(reference, rope, MIXED, latent_shape(heads=5))


@BOTH
def test_the_first_positions_may_be_hidden(attention: Any) -> None:
    check_first_position(attention, rope, [(1, 3), (7, 7), (5, 40), (1, 1)])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_latents_are_attended_to_as_they_are_stored(attention: Any, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    check(attention, rope, MIXED, latent_shape(dtype=dtype, kv_dtype=FP8), tolerance=tolerance)


@BOTH
def test_bfloat16(attention: Any) -> None:
    check(attention, rope, MIXED, latent_shape(dtype=torch.bfloat16), tolerance=4e-2)


@BOTH
def test_masked_writes(attention: Any) -> None:
    check_masked_writes(attention, rope)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_bits_by_key_tiles_depend_on_the_sequence_alone(kv_dtype: torch.dtype) -> None:
    def attention(**_: int) -> ModuleType:
        return by_key_tiles

    check_bits(attention, rope, latent_shape(3, 16, 8, kv_dtype=kv_dtype), [75, 41])
