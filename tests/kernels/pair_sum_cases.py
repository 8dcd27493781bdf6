"""Sums of what experts made of pairs, and norms that add them up, in any kernels' device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.norm import triton as norm
from tests.kernels.rounding_cases import READERS, check_rounded

EPS = 1e-5
# Fields: chosen, slices beside, whether these have a gate, whether some experts are elsewhere.
KINDS = [(1, 0, False, False), (6, 0, False, True), (3, 2, False, False), (8, 1, True, False)]
TYPES = [
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32, torch.float32),
]
EXPERTS = 5  # and one more, if some are elsewhere


def pair_parts(
    tokens: int,
    width: int,
    kind: tuple[int, int, bool, bool],
    dtype: torch.dtype,
    of_sum: torch.dtype,
    device: str,
) -> Any:
    """Random parts; those of experts elsewhere are NaN."""
    from megatron_hybrid.kernels.experts.sums import PairParts

    chosen, slices, has_gate, some_elsewhere = kind
    generator = torch.Generator().manual_seed(width + chosen)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    experts = torch.randint(0, EXPERTS + some_elsewhere, (tokens, chosen), generator=generator)
    experts = experts.to(device, torch.int32)
    parts = drawn(tokens * chosen, width)
    parts[(experts == EXPERTS).flatten()] = float("nan")
    return PairParts(
        parts,
        experts,
        EXPERTS if some_elsewhere else 0,
        drawn(slices, tokens, width) if slices else None,
        drawn(tokens, width) if has_gate else None,
        drawn(1, width) * 0.1 if has_gate else None,
        None if of_sum == dtype else of_sum,
    )


def by_hand(pairs: Any) -> Tensor:
    """[tokens, width] float64."""
    here = (pairs.experts < EXPERTS).flatten()[:, None]
    parts = torch.where(here, pairs.parts.double(), 0.0)
    total = parts.unflatten(0, pairs.experts.shape).sum(1)
    if pairs.beside is not None:
        beside = pairs.beside.double().sum(0)
        if pairs.gate is not None:
            beside *= (pairs.x.double() @ pairs.gate.double().t()).sigmoid()
        total += beside
    return total


def check_sums(tokens: int, width: int, kind: Any, types: Any, device: str) -> None:
    """The sum as it is by hand, and the norm of it as of two kernels, bit for bit."""
    dtype, of_sum, of_residual = types
    pairs = pair_parts(tokens, width, kind, dtype, of_sum, device)
    total = pairs.sum()
    assert total.dtype == of_sum
    limit = 1e-2 if of_sum == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total.double(), by_hand(pairs), atol=4 * limit, rtol=limit)
    generator = torch.Generator().manual_seed(tokens)
    residual = torch.randn(tokens, width, generator=generator).to(device, of_residual)
    weight = torch.rand(width, generator=generator).to(device, of_sum)
    expected = norm.add_rms_norm(total, residual.clone(), 0.22, weight, EPS, of_sum)
    found = pairs.add_rms_norm(residual.clone(), 0.22, weight, EPS, of_sum)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, Tensor) and torch.equal(ours, theirs)


def check_rounded_sums(reader: str, plain: bool, device: str) -> None:
    """Rounded for who reads the norm, as it is rounded afterwards."""
    width = 384
    pairs = pair_parts(9, width, KINDS[3], torch.bfloat16, torch.bfloat16, device)
    residual, weight = torch.ones(9, width, device=device), torch.rand(width, device=device)

    def call(into: Any) -> Any:
        kept = weight.bfloat16()
        return pairs.add_rms_norm(residual.clone(), 1.0, kept, EPS, torch.bfloat16, into)

    check_rounded(call, READERS[reader], plain=plain, device=device)


of_kinds_and_types = pytest.mark.parametrize(
    ("kind", "types"), [(kind, types) for kind in KINDS for types in TYPES]
)
of_readers = pytest.mark.parametrize("reader", READERS)
