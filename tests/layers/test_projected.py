"""Decodes of Mamba1 layers by the kernel that begins with x_proj's result, in Triton's interpreter,
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
from megatron_hybrid.kernels.contract import DecodeSlots  # noqa: E402
from megatron_hybrid.kernels.kernel_set import REFERENCE, KernelSet  # noqa: E402
from megatron_hybrid.kernels.linear.formats import WeightFormat  # noqa: E402
from megatron_hybrid.layers.inputs import allocate_caches  # noqa: E402
from megatron_hybrid.layers.kernel_plans import KernelPlans  # noqa: E402
from megatron_hybrid.layers.linear import Formats, allocate_linears  # noqa: E402
from megatron_hybrid.layers.mamba1 import Mamba1, Mamba1Config  # noqa: E402
from megatron_hybrid.layers.mixer import LayerContext  # noqa: E402
from megatron_hybrid.parallel import initialize  # noqa: E402
from tests.kernels.segments import Segment, int64, prefill_segments  # noqa: E402

WIDTH, LAYER = 32, 3
CONFIG = Mamba1Config(inner_size=64, state_size=8, dt_rank=24, conv_width=4)
# In place, moved, new, and a padded row.
SLOTS = DecodeSlots(int64([1, 2, 0, 0]), int64([1, 3, 4, 0]))


def layer_of(norms: str, formats: Formats = lambda role: None) -> Mamba1:
    """With random weights."""
    parallel = initialize()
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    context = LayerContext(
        WIDTH, 1e-5, LAYER, torch.bfloat16, parallel.tensor, parallel.experts, *kinds
    )
    layer = Mamba1(replace(CONFIG, norms=norms), context)
    allocate_linears(layer.weight_parts(), formats)
    generator = torch.Generator().manual_seed(0)
    for part in layer.weight_parts():
        part.put(torch.randn(part.target.shape, generator=generator) * part.shape[-1] ** -0.5)
    layer.after_loading()
    return layer


class Counted:
    """A kernel, and the names of its functions that were called."""

    def __init__(self, kernel: Any, calls: list[str]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._kernel, name)


def kernels_of(calls: list[str] | None) -> KernelSet:
    """Triton's of a Mamba1 layer; `calls`: those of the kernel that is several, None: without."""
    gpu = kernel_set._gpu()
    names = ("plan_decode", "plan_runs", "conv", "mamba1_scan", "norm")
    found = replace(REFERENCE, **{name: getattr(gpu, name) for name in names})
    if calls is None:
        return found
    return replace(found, projected_mamba1=Counted(gpu.projected_mamba1, calls))


def step(
    layer: Mamba1, kernels: KernelSet, decode: DecodeSlots, prompt: bool = False
) -> tuple[Tensor, ...]:
    """The result of some decodes, and of a prompt, and what is in the caches then."""
    count = decode.read_slot.shape[0]
    caches = allocate_caches({}, {LAYER: layer.spec}, 1, 1, 6, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    state = caches.state[LAYER]
    for tensor in (state.conv, state.ssm):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    x = torch.randn(count + 5 * prompt, WIDTH, generator=generator).bfloat16()
    segments = prefill_segments([Segment(0, 5, 0, 5)]) if prompt else None
    parts = layer.plan(count, decode, segments, kernels)
    y = layer(x, KernelPlans(caches, kernels, recurrent={layer.kind: parts}))
    return y, state.conv, state.ssm


@pytest.mark.parametrize("norms", ["learned", "plain", "none"])
def test_one_kernel_does_what_three_do(norms: str) -> None:
    layer, calls = layer_of(norms), list[str]()
    y, conv, ssm = step(layer, kernels_of(calls), SLOTS)
    assert calls == ["takes", "decode"]
    expected, other_conv, other_ssm = step(layer, kernels_of(None), SLOTS)
    assert torch.equal(conv, other_conv)
    # In the interpreter a step size that is rounded otherwise is off by 2^-7.
    torch.testing.assert_close(y, expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(ssm, other_ssm, atol=2e-2, rtol=2e-2)
    assert torch.equal(ssm[[0, 2, 5]], other_ssm[[0, 2, 5]])


def in_8_bits(role: str) -> WeightFormat | None:
    return WeightFormat("int8") if role == "dt_proj.weight" else None


MORE = DecodeSlots(*[int64([1, 2, 3, 4, 5])] * 2)


@pytest.mark.parametrize(
    ("formats", "decode", "prompt", "asked"),
    [
        (in_8_bits, SLOTS, False, False),
        (lambda role: None, SLOTS, True, False),
        (lambda role: None, MORE, False, True),
    ],
    ids=["quantised", "beside a prompt", "many sequences"],
)
def test_other_steps_take_a_kernel_a_piece(
    formats: Formats, decode: DecodeSlots, prompt: bool, asked: bool
) -> None:
    layer, calls = layer_of("learned", formats), list[str]()
    found = step(layer, kernels_of(calls), decode, prompt)
    assert calls == ["takes"] * asked
    for ours, expected in zip(found, step(layer, kernels_of(None), decode, prompt), strict=True):
        assert torch.equal(ours, expected)
