"""DecodeRuns by the Triton kernels, in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels.contract import DecodeRuns
from tests.kernels import conv_cases, test_gated_delta_rule, test_mamba1_scan, test_mamba2_scan
from tests.kernels.recurrence_contract import Recurrence, check_runs
from tests.kernels.runs_cases import Play
from tests.thorough import usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.causal_conv1d import triton as conv  # noqa: E402
from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402
from megatron_hybrid.kernels.mamba1_scan import triton as mamba1  # noqa: E402
from megatron_hybrid.kernels.mamba2_scan import triton as mamba2  # noqa: E402
from megatron_hybrid.kernels.mamba2_scan.triton_decode import choose_rows  # noqa: E402


def as_it_is(runs: DecodeRuns, ring_length: int) -> Any:
    """The kernels read the runs on the device."""
    return runs


@pytest.fixture(scope="module", params=["mamba2", "mamba1", "gated delta rule"])
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    if request.param == "mamba2":
        draw = partial(test_mamba2_scan.draw, head_dim=16, size=8)
        return Recurrence(mamba2, (4, 16, 8), draw, test_mamba2_scan.step, as_it_is)
    if request.param == "mamba1":
        draw = partial(test_mamba1_scan.draw, channels=24, size=8)
        return Recurrence(mamba1, (24, 8), draw, test_mamba1_scan.step, as_it_is)
    draw = partial(test_gated_delta_rule.draw, v_dim=16, k_dim=8)
    return Recurrence(delta_rule, (4, 16, 8), draw, test_gated_delta_rule.step, as_it_is)


@pytest.mark.parametrize("seed", range(usually(1, 2)))
def test_runs_equal_the_token_loop_whatever_is_accepted(recurrence: Recurrence, seed: int) -> None:
    check_runs(recurrence, Play(seed, count=3), padding=seed, calls=6)


@pytest.mark.parametrize("seed", range(usually(1, 2)))
def test_single_tokens_equal_the_token_loop(recurrence: Recurrence, seed: int) -> None:
    check_runs(recurrence, Play(seed, count=3, ring_length=4, most=1), padding=seed, calls=8)


@pytest.mark.parametrize(("size", "block_p"), [(8, 16), (64, 8), (64, 16)])
def test_mamba2s_programs_may_have_any_rows(size: int, block_p: int) -> None:
    kernel = SimpleNamespace(decode_runs=partial(mamba2.decode_runs, block_p=block_p))
    draw = partial(test_mamba2_scan.draw, head_dim=16, size=size)
    recurrence = Recurrence(kernel, (4, 16, size), draw, test_mamba2_scan.step, as_it_is)
    check_runs(recurrence, Play(size, count=3, ring_length=4, most=1), padding=1, calls=8)


@pytest.mark.parametrize(
    ("sequences", "heads", "size", "rows"),
    [(1, 128, 128, 8), (16, 128, 128, 8), (17, 128, 128, 32), (42, 48, 64, 8), (43, 48, 64, 64)],
)
def test_programs_of_few_sequences_have_few_rows(
    sequences: int, heads: int, size: int, rows: int
) -> None:
    assert choose_rows(sequences, heads, 64, size) == rows


@pytest.mark.parametrize("seed", range(3))
def test_convolutions_equal_the_loop_by_hand(seed: int) -> None:
    options = {"bias": seed % 2 == 0, "packed": seed % 3 == 0}
    width = 2 + seed % 3
    play = Play(seed)
    conv_cases.check_runs(conv, play, seed != 1, calls=6, channels=260, width=width, **options)


@pytest.mark.parametrize("seed", range(3))
def test_convolutions_of_single_tokens_equal_the_loop_by_hand(seed: int) -> None:
    """With padding behind them."""
    options = {"bias": seed % 2 == 0, "packed": seed % 3 == 0}
    tiled = SimpleNamespace(
        plan_runs=conv.plan_runs,
        decode_runs=partial(conv.decode_runs, tile=conv.Tile(64, warps=1)),
    )
    play = Play(seed, count=5, ring_length=4, most=1)
    conv_cases.check_runs(
        tiled, play, seed != 1, calls=12, channels=70, width=2 + seed % 3, **options
    )
