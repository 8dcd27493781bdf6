"""Decodes of recurrent layers by kernels that convolve for themselves, in Triton's interpreter,
beside the same by a kernel a piece."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels import kernel_set  # noqa: E402
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots  # noqa: E402
from megatron_hybrid.kernels.kernel_set import REFERENCE, KernelSet  # noqa: E402
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig  # noqa: E402
from megatron_hybrid.layers.inputs import LayerCaches, allocate_caches  # noqa: E402
from megatron_hybrid.layers.kernel_plans import KernelPlans  # noqa: E402
from megatron_hybrid.layers.linear import allocate_linears  # noqa: E402
from megatron_hybrid.layers.mamba2 import Mamba2, Mamba2Config  # noqa: E402
from megatron_hybrid.layers.mixer import LayerContext  # noqa: E402
from megatron_hybrid.layers.recurrent import RecurrentMixer  # noqa: E402
from megatron_hybrid.parallel import initialize  # noqa: E402
from tests.kernels.segments import int64  # noqa: E402

WIDTH, LAYER = 32, 3
MAMBA2 = Mamba2Config(4, 16, 8, 2, 4, 16)
DELTA_NET = GatedDeltaNetConfig(2, 4, 8, 16, 4)


def layer_of(kind: Any, config: Any) -> RecurrentMixer:
    """With random weights."""
    parallel = initialize()
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    context = LayerContext(
        WIDTH, 1e-5, LAYER, torch.bfloat16, parallel.tensor, parallel.experts, *kinds
    )
    layer = kind(config, context)
    allocate_linears(layer.weight_parts(), lambda role: None)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parameter.mul_(parameter.shape[-1] ** -0.5)
    layer.after_loading()
    return layer


def kernels_of(fused: bool, calls: list[Any]) -> KernelSet:
    """Triton's of recurrences; `calls`: what is taken by those that convolve."""
    gpu = kernel_set._gpu()
    found = replace(
        REFERENCE,
        plan_decode=gpu.plan_decode,
        plan_runs=gpu.plan_runs,
        conv=gpu.conv,
        mamba2_scan=gpu.mamba2_scan,
        gated_delta_rule=gpu.gated_delta_rule,
        norm=gpu.norm,
    )
    if not fused:
        return found

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self._kernel, name)

    return replace(
        found,
        convolved_mamba2=Counted(gpu.convolved_mamba2),
        convolved_delta_rule=Counted(gpu.convolved_delta_rule),
    )


def decoded(layer: RecurrentMixer, decode: Any, kernels: KernelSet) -> tuple[Tensor, LayerCaches]:
    """The result of a few decodes, and what is in the caches then."""
    count = decode.read_slot.shape[0]
    caches = allocate_caches(
        {}, {LAYER: layer.spec}, 1, 1, 4, torch.device("cpu"), num_rings=2, ring_length=4
    )
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors_of(caches):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    x = torch.randn(count, WIDTH, generator=generator).bfloat16()
    parts = layer.plan(count, decode, None, kernels, caches.ring_length)
    return layer(x, KernelPlans(caches, kernels, recurrent={layer.kind: parts})), caches


def tensors_of(caches: LayerCaches) -> list[Tensor]:
    state, rings = caches.state[LAYER], caches.rings[LAYER]
    return [state.conv, state.ssm, rings.conv, *rings.inputs]


RUNS = DecodeRuns(
    int64([0, 1, 2]), int64([9, 12]), int64([3, 1]), int64([1, 2]), int64([3, 0]), int64([1, 0]),
    int64([0, 0]), int64([0, 0]), most_unfolded=3,
)  # fmt: skip
SLOTS = DecodeSlots(int64([1, 2]), int64([1, 3]))


@pytest.mark.parametrize(
    ("kind", "config", "decode", "call"),
    [
        (Mamba2, MAMBA2, RUNS, "decode_runs"),
        (GatedDeltaNet, DELTA_NET, SLOTS, "decode"),
    ],
)
def test_a_kernel_that_convolves_does_what_several_do(
    kind: Any, config: Any, decode: Any, call: str
) -> None:
    layer, calls = layer_of(kind, config), []
    y, caches = decoded(layer, decode, kernels_of(True, calls))
    assert calls == ["takes", call]
    expected, others = decoded(layer, decode, kernels_of(False, calls))
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(tensors_of(caches), tensors_of(others), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "decode"),
    [
        (Mamba2, MAMBA2, SLOTS),
        (Mamba2, MAMBA2, replace(RUNS, most_unfolded=None)),
        (GatedDeltaNet, DELTA_NET, RUNS),
    ],
)
def test_other_decodes_take_a_kernel_a_piece(kind: Any, config: Any, decode: Any) -> None:
    layer, calls = layer_of(kind, config), []
    y, _ = decoded(layer, decode, kernels_of(True, calls))
    assert torch.equal(y, decoded(layer, decode, kernels_of(False, []))[0])
    assert not set(calls) - {"takes"}
