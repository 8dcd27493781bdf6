"""DecodeRuns by the Triton kernels, in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid.kernels.contract import DecodeRuns
from tests.kernels import (
    conv_cases,
    test_gated_delta_rule,
    test_kimi_delta_attention,
    test_mamba1_scan,
    test_mamba2_scan,
)
from tests.kernels.recurrence_contract import Recurrence, check_runs
from tests.kernels.runs_cases import Play
from tests.kernels.segments import poisoned
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.causal_conv1d import triton as conv  # noqa: E402
from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402
from megatron_hybrid.kernels.gated_delta_rule import triton_decode as delta_decode  # noqa: E402
from megatron_hybrid.kernels.mamba1_scan import triton as mamba1  # noqa: E402
from megatron_hybrid.kernels.mamba2_scan import triton as mamba2  # noqa: E402


def as_it_is(runs: DecodeRuns, ring_length: int) -> Any:
    """The kernels read the runs on the device."""
    return runs


@pytest.fixture(
    scope="module", params=["mamba2", "mamba1", "gated delta rule", "KDA", "bounded KDA"]
)
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    if request.param == "mamba2":
        draw = partial(test_mamba2_scan.draw, head_dim=16, size=8)
        return Recurrence(mamba2, (4, 16, 8), draw, test_mamba2_scan.step, as_it_is)
    if request.param == "mamba1":
        draw = partial(test_mamba1_scan.draw, channels=24, size=8)
        return Recurrence(mamba1, (24, 8), draw, test_mamba1_scan.step, as_it_is)
    if "KDA" in request.param:
        bound = -5.0 if "bounded" in request.param else None
        draw = partial(test_kimi_delta_attention.draw, v_dim=16, k_dim=8, lower_bound=bound)
        step = test_kimi_delta_attention.step
        return Recurrence(delta_rule, (4, 16, 8), draw, step, as_it_is)
    draw = partial(test_gated_delta_rule.draw, v_dim=16, k_dim=8)
    return Recurrence(delta_rule, (4, 16, 8), draw, test_gated_delta_rule.step, as_it_is)


@pytest.mark.parametrize("seed", range(usually(1, 2)))
def test_runs_equal_the_token_loop_whatever_is_accepted(recurrence: Recurrence, seed: int) -> None:
    check_runs(recurrence, Play(seed, count=3), padding=seed, calls=6)


@pytest.mark.parametrize("seed", range(usually(1, 2)))
def test_single_tokens_equal_the_token_loop(recurrence: Recurrence, seed: int) -> None:
    check_runs(recurrence, Play(seed, count=3, ring_length=4, most=1), padding=seed, calls=8)


@A_THIRD
@pytest.mark.parametrize(("size", "block_p"), [(8, 16), (64, 8), (64, 16)])
def test_mamba2s_programs_may_have_any_rows(size: int, block_p: int) -> None:
    kernel = SimpleNamespace(decode_runs=partial(mamba2.decode_runs, block_p=block_p))
    draw = partial(test_mamba2_scan.draw, head_dim=16, size=size)
    recurrence = Recurrence(kernel, (4, 16, size), draw, test_mamba2_scan.step, as_it_is)
    check_runs(recurrence, Play(size, count=3, ring_length=4, most=1), padding=1, calls=8)


@A_THIRD
@pytest.mark.parametrize(
    ("k_dim", "block_v", "ring_length"),
    [(8, 16, 3), (64, 16, 5), (64, 8, 9), (16, None, 11), (40, None, 5)],
)
def test_the_delta_rules_programs_may_have_any_rows(
    k_dim: int, block_v: int | None, ring_length: int
) -> None:
    """And so many unfolded tokens, at last more than are taken at once."""
    kernel = SimpleNamespace(decode_runs=partial(delta_rule.decode_runs, block_v=block_v))
    draw = partial(test_gated_delta_rule.draw, v_dim=16, k_dim=k_dim)
    recurrence = Recurrence(kernel, (4, 16, k_dim), draw, test_gated_delta_rule.step, as_it_is)
    play = Play(k_dim, count=3, ring_length=ring_length, most=1)
    check_runs(recurrence, play, padding=1, calls=2 * ring_length)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


@A_THIRD
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "seed"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.float32, None),
        *usually(
            [], [(torch.bfloat16, torch.bfloat16, None), (torch.bfloat16, torch.float16, None)]
        ),
        (torch.bfloat16, torch.float16, 12345),
    ],
)
def test_the_delta_rules_single_tokens_are_those_of_its_runs(
    dtype: torch.dtype, state_dtype: torch.dtype, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any types, beside sequences that begin, and with calls that have drafts between those that
    have none: either kernel goes on from what the other has left."""
    single = Counted(delta_decode._single_kernel)
    monkeypatch.setattr(delta_decode, "_single_kernel", single)
    play, number = Play(6, count=3, ring_length=6, start=20), 0
    drawn = torch.Generator().manual_seed(1)
    states = torch.randn(play.slots, 4, 16, 32, generator=drawn).to(state_dtype)
    states[0] = torch.nan
    wide = partial(test_gated_delta_rule.draw, v_dim=16, k_dim=32)
    kept = wide(1).to(dtype).tokens.kept
    rings = tuple(poisoned(play.count, 6, *values.shape[1:], dtype=dtype) for values in kept)
    ours, theirs = ((states.clone(), tuple(ring.clone() for ring in rings)) for _ in range(2))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    state_tolerance = 2e-5 if state_dtype == torch.float32 else 2e-2
    while single.launches < usually(6, 20):
        play.most = 3 if number % 3 == 2 else 1
        if number % 4 == 3:
            new = play.sequences[number % 3]
            new.slot = new.position = new.unfolded = 0
        call = play.call(padding=number % 2)
        data = wide(sum(call.lengths) + call.padding, seed=number).to(dtype)
        constants = data.constants._replace(rounding_seed=seed)
        runs = call.runs()
        y = delta_rule.decode_runs(data.tokens, constants, *ours, runs)
        before = single.launches
        every_run = replace(runs, most_unfolded=None)
        expected = delta_rule.decode_runs(data.tokens, constants, *theirs, every_run)
        assert single.launches == before
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            ours[0].float(), theirs[0].float(), atol=state_tolerance, rtol=state_tolerance,
            equal_nan=True,
        )  # fmt: skip
        for own, other in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(own, other, atol=0, rtol=0, equal_nan=True)
        call.done()
        number += 1


@A_THIRD
@pytest.mark.parametrize(("seed", "width"), [(0, 2), (1, 3), (2, 4), (3, 10)])
def test_convolutions_equal_the_loop_by_hand(seed: int, width: int) -> None:
    options = {"bias": seed % 2 == 0, "packed": seed % 3 == 0}
    play = Play(seed)
    conv_cases.check_runs(conv, play, seed != 1, calls=6, channels=260, width=width, **options)


@A_THIRD
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
