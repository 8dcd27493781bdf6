"""Stochastic rounding of states: what it is, and that every kernel stores just that of what it
would store in float32."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.runs import plan_runs
from megatron_hybrid.kernels.state_rounding.reference import layer_seed, random_bits, rounded
from tests.kernels import test_gated_delta_rule, test_mamba1_scan, test_mamba2_scan
from tests.kernels.recurrence_contract import Data, Recurrence
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, prefill_segments
from tests.thorough import A_THIRD, EVERYTHING, usually

CHUNK, SEED = 16, 12345
KERNELS = ["reference"]
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    KERNELS.append("triton")  # in its interpreter
KINDS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "mamba2_scan": (
        test_mamba2_scan,
        (4, 16, 16),
        partial(test_mamba2_scan.draw, head_dim=16, size=16),
    ),
    "mamba1_scan": (
        test_mamba1_scan,
        (24, 8),
        partial(test_mamba1_scan.draw, channels=24, size=8),
    ),
    "gated_delta_rule": (
        test_gated_delta_rule,
        (4, 16, 16),
        partial(test_gated_delta_rule.draw, v_dim=16, k_dim=16),
    ),
}


def as_it_is(runs: DecodeRuns, ring_length: int) -> Any:
    return runs


@pytest.fixture(params=[f"{kind}.{kernel}" for kind in KINDS for kernel in KERNELS])
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    kind, kernel = request.param.split(".")
    cases, shape, draw = KINDS[kind]
    module = import_module(f"megatron_hybrid.kernels.{request.param}")
    plan = plan_runs if kernel == "reference" else as_it_is
    return Recurrence(module, shape, draw, cases.step, plan)


def seeded(data: Data) -> Data:
    return replace(data, constants=data.constants._replace(rounding_seed=SEED))


def check_slots(stored: Tensor, exact: Tensor, positions: dict[int, int]) -> None:
    """`positions`: of the slots that were written."""
    assert stored.dtype == torch.float16 and exact.dtype == torch.float32
    for slot, position in positions.items():
        expected = rounded(exact[slot][None], SEED, torch.tensor([position]))[0]
        assert torch.equal(stored[slot], expected)
        assert not torch.equal(stored[slot], exact[slot].half())  # to the nearest


@A_THIRD
def test_prompts(recurrence: Recurrence) -> None:
    segments = [
        Segment(0, 37, 0, 2, [(16, 3), (32, 4)]),
        Segment(5, 20, 1, 5, [(16, 6)]),
        Segment(48, 0, 1, 7),  # nothing but a copy
    ]
    plan = recurrence.kernel.plan(prefill_segments(segments, 1, [CHUNK]), CHUNK)
    data = recurrence.draw(57)
    stored = recurrence.poisoned(8, torch.float16)
    stored[1] = torch.randn(recurrence.shape, generator=torch.Generator().manual_seed(1)).half()
    exact = stored.float()
    recurrence.kernel.prefill(*seeded(data).arguments(), state=stored, plan=plan)
    recurrence.kernel.prefill(*data.arguments(), state=exact, plan=plan)
    check_slots(stored, exact, {2: 37, 3: 16, 4: 32, 5: 25, 6: 16})
    assert torch.equal(stored[7], stored[1])


@A_THIRD
@pytest.mark.parametrize("most", [1, 4])
def test_runs(recurrence: Recurrence, most: int) -> None:
    """Sequences with unfolded tokens, drafts, checkpoints; and of one token each, for which Mamba2
    and the gated delta rule have kernels of their own."""
    if most == 1 and recurrence.shape == KINDS["mamba1_scan"][1] and not EVERYTHING:
        pytest.skip("others show much the same: TESTS=all")
    play = Play(3, count=3, ring_length=4 if most == 1 else 7, most=most, start=40)
    stored = torch.randn(
        play.slots, *recurrence.shape, generator=torch.Generator().manual_seed(0)
    ).half()
    rings = recurrence.rings(play.count, play.ring_length)
    for ring in rings:
        ring.normal_()
    written = 0
    for number in range(usually(4, 6)):
        call = play.call(padding=number % 2)
        data = recurrence.draw(sum(call.lengths) + call.padding, seed=number)
        exact, other_rings = stored.float(), tuple(ring.clone() for ring in rings)
        recurrence.decode_runs(data, call.runs(), other_rings, exact)
        recurrence.decode_runs(seeded(data), call.runs(), rings, stored)
        positions = {}
        for s, one in enumerate(play.sequences):
            if call.writes[s] and one.unfolded + call.lengths[s]:
                positions[call.writes[s]] = one.position + min(call.lengths[s], 1)
            if call.reached(s):
                positions[one.checkpoint[1]] = one.checkpoint[0]
        check_slots(stored, exact, positions)
        written += len(positions)
        call.done()
    assert written >= 4


def test_it_is_right_on_average() -> None:
    """Whatever a number's size, and for each place by itself."""
    draws = 4096
    generator = torch.Generator().manual_seed(0)
    exact = (torch.randn(500, generator=generator) * torch.logspace(-8, 4.8, 500)).clamp(-6e4, 6e4)
    found = rounded(exact.expand(draws, 500), SEED, torch.arange(draws)).double()
    near = exact.half()
    apart = torch.nextafter(near.abs(), torch.tensor(torch.inf).half()).double() - near.abs()
    errors = (found - exact.double()) / apart
    assert errors.abs().max() < 1
    assert errors.mean(0).abs().max() < 5 * 0.5 / draws**0.5
    assert errors.mean().abs() < 5 * 0.5 / (draws * 500) ** 0.5


def test_what_has_no_rounding_error_stays() -> None:
    exact = torch.tensor([0.0, -0.0, 1.5, -65504.0, 2.0**-24, -(2.0**-14), 1023 * 2.0**-24])
    for position in range(64):
        found = rounded(exact[None], SEED, torch.tensor([position]))[0]
        assert torch.equal(found.float(), exact)
    beyond = torch.tensor([[7e4, -1e9, torch.inf, -torch.inf, torch.nan]])
    found = rounded(beyond, SEED, torch.tensor([3]))[0]
    assert found[:4].tolist() == [65504, -65504, 65504, -65504]
    assert found[4].isnan()


def test_a_little_that_is_added_again_and_again_arrives() -> None:
    """To the nearest, the sum would stay what it is."""
    total = torch.full((1, 1000), 4.0)
    for position in range(2000):
        total = rounded(total + 1e-4, SEED, torch.tensor([position])).float()
    assert (total.mean() - 4.2).abs() < 0.005


def test_places_positions_layers_and_ranks_are_independent() -> None:
    place, position = torch.arange(512), torch.arange(512)[:, None]
    seeds = [layer_seed(1234, layer, rank) for layer in range(3) for rank in range(2)]
    assert len(set(seeds)) == 6 and all(0 < seed < 2**31 and seed % 2 for seed in seeds)
    fields = [random_bits(seed, position, place) for seed in seeds]
    first = fields[0]
    others = [*fields[1:], first.roll(1, 0), first.roll(1, 1), first.roll(16, 1), first.T]
    for other in others:
        correlation = torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]
        assert correlation.abs() < 0.01  # 5 / 512
    assert first.unique().numel() == 8192
