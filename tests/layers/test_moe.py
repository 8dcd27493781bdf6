"""A layer of experts on Triton's kernels, in its interpreter, beside the reference's."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels compiled", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from megatron_hybrid.kernels.experts import reference, routing, triton  # noqa: E402
from megatron_hybrid.kernels.experts.protocol import (  # noqa: E402
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.kernel_set import REFERENCE  # noqa: E402
from megatron_hybrid.kernels.linear.formats import WeightFormat  # noqa: E402
from megatron_hybrid.kernels.norm import triton as triton_norm  # noqa: E402
from megatron_hybrid.kernels.protocols import Reader  # noqa: E402
from megatron_hybrid.layers.kernel_plans import KernelPlans  # noqa: E402
from megatron_hybrid.layers.linear import allocate_linears  # noqa: E402
from megatron_hybrid.layers.mixer import LayerContext, added_up  # noqa: E402
from megatron_hybrid.layers.mlp import MLPConfig  # noqa: E402
from megatron_hybrid.layers.moe import MoE, MoEConfig  # noqa: E402
from megatron_hybrid.layers.norm import RMSNorm  # noqa: E402
from megatron_hybrid.models.blocks import Addend, MoEBlock  # noqa: E402
from megatron_hybrid.parallel import RankGroup, initialize  # noqa: E402
from tests.parallel.pretend import first_of  # noqa: E402
from tests.thorough import A_THIRD

WIDTH = 40
GATED = MLPConfig(24, gated=True, activation="silu")
PLAIN = MLPConfig(24, gated=False, activation="relu2")
MANY = triton._MOST_SHARING + 1
LONG = 1040


def layer_of(
    config: MoEConfig, ranks: int = 1, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> MoE:
    """With random weights; as the first of several ranks that hold a part of each expert."""
    parallel = initialize()
    parallel = first_of(parallel, ranks) if ranks > 1 else parallel
    kinds = (torch.float32,) * 3
    context = LayerContext(width, 1e-5, 0, dtype, parallel.tensor, parallel.experts, *kinds)
    layer = MoE(config, context)
    allocate_linears(layer.weight_parts(), lambda role: None)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parameter.mul_(parameter.shape[-1] ** -0.5)
    return layer


def config_of(expert: MLPConfig, shared: MLPConfig | None, **more: Any) -> MoEConfig:
    return MoEConfig(num_experts=4, experts_per_token=2, expert=expert, shared=shared, **more)


def run(layer: MoE, tokens: int) -> tuple[Tensor, Tensor, list[Shared | None]]:
    """What Triton's kernels give, what the reference does, and what was given to the former of the
    shared MLP."""
    given: list[Shared | None] = []

    def noted(mix: Any) -> Any:
        def call(*arguments: Any, shared: Shared | None = None, **more: Any) -> Any:
            given.append(shared)
            return mix(*arguments, shared=shared, **more)

        return call

    mixes = {name: noted(getattr(triton, name)) for name in ("mix", "mix_parts")}
    kernels: Any = SimpleNamespace(**{**vars(triton), **mixes})
    caches: Any = None
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    ours = added_up(layer(x, KernelPlans(caches, replace(REFERENCE, experts=kernels))))
    return ours, layer(x, KernelPlans(caches, REFERENCE)), given


@A_THIRD
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("expert", [GATED, PLAIN])
@pytest.mark.parametrize(
    ("tokens", "inner", "kind"),
    [
        (2, 40, SharedExpert),
        (20, 48, SharedExpert),
        (20, 40, SharedResult),
        (MANY, 48, SharedResult),
    ],
)
def test_the_shared_mlp_is_computed_by_the_experts_kernels_or_added_by_them(
    tokens: int, inner: int, kind: type, expert: MLPConfig, has_gate: bool
) -> None:
    shared = replace(expert, intermediate_size=inner)
    layer = layer_of(config_of(expert, shared, shared_gate=has_gate))
    ours, expected, given = run(layer, tokens)
    assert [type(one) for one in given] == [kind]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "shared", [replace(PLAIN, activation="silu"), GATED, replace(PLAIN, bias=True)]
)
def test_a_shared_mlp_of_another_kind_is_computed_by_itself(shared: MLPConfig) -> None:
    ours, expected, given = run(layer_of(config_of(PLAIN, shared)), 20)
    assert [type(one) for one in given] == [SharedResult]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_between_projections_know_nothing_of_the_shared_mlp(
    has_gate: bool, tokens: int
) -> None:
    layer = layer_of(config_of(GATED, GATED, shared_gate=has_gate, latent_size=16))
    ours, expected, given = run(layer, tokens)
    assert given == [None]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_layer_without_a_shared_mlp() -> None:
    ours, expected, given = run(layer_of(config_of(GATED, None)), 20)
    assert given == [None]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_rank_has_its_part_of_the_experts_and_of_the_shared_mlp() -> None:
    config = config_of(GATED, replace(GATED, intermediate_size=48))
    ours, expected, given = run(layer_of(config, ranks=2), 20)
    assert isinstance(given[0], SharedExpert) and given[0].down.shape == (WIDTH, 24)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


class Blocks:
    """A block of experts, whose norm and router are Triton's kernels, which say when they were
    called."""

    def __init__(self, zero_centered: bool = False, **options: Any) -> None:
        config = config_of(GATED, options.pop("shared", None), shared_gate=False)
        layer = layer_of(config, width=LONG, dtype=torch.float16)
        norm = RMSNorm(LONG, 1e-5, torch.float16, zero_centered)
        norm.weight.copy_(torch.rand(LONG, generator=torch.Generator().manual_seed(1)) + 0.5)
        ranks = initialize().tensor
        self.block = MoEBlock(norm, layer, ranks, Addend(0.5, ranks))
        self.calls: list[str] = []
        others = {"mix_parts": reference.mix, "takes_shared": reference.takes_shared}
        experts: Any = SimpleNamespace(**{**vars(triton), **others})
        norms: Any = SimpleNamespace(**vars(triton_norm))
        self.kernels = replace(REFERENCE, experts=experts, norm=norms)
        self._note(experts, "route")
        self._note(norms, "add_rms_norm")
        self._note(norms, "rms_norm")

    def _note(self, kernels: Any, name: str) -> None:
        usual = getattr(kernels, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            self.calls.append(name)
            return usual(*arguments, **more)

        setattr(kernels, name, noted)

    def run(
        self, tokens: int, is_first: bool = False, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What the mixer gives, and the residual stream."""
        mixed, residual = torch.randn(2, tokens, LONG, generator=torch.Generator().manual_seed(2))
        caches: Any = None
        self.calls = []
        given = None if is_first else mixed.half() * factor
        found = self.block(given, residual.half(), KernelPlans(caches, self.kernels))
        return found[0], found[1]


@pytest.mark.parametrize("zero_centered", [True, False])
def test_a_block_makes_its_norm_with_the_router(
    zero_centered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(zero_centered, shared=GATED)
    together = blocks.run(2)
    assert blocks.calls == []
    monkeypatch.setattr(routing, "_MOST_NORMS", 0)
    apart = blocks.run(2)
    assert blocks.calls == ["add_rms_norm", "route"]
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])


def test_a_block_makes_its_norm_apart_where_there_is_no_sum_or_more_than_one_kernel_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = Blocks()
    blocks.run(2, is_first=True)
    assert blocks.calls == ["rms_norm", "route"]
    blocks.run(routing._FEW_TOKENS + 1)
    assert blocks.calls == ["add_rms_norm", "route"]
    # a shared MLP with quantised weights takes its inputs rounded
    reader = Reader(WeightFormat("int8", activations="token"), None, plain=True)
    monkeypatch.setattr(MoE, "reader", reader)
    blocks.run(2)
    assert blocks.calls == ["add_rms_norm", "route"]


def test_a_block_makes_its_norm_apart_where_several_ranks_have_parts_of_the_sum() -> None:
    blocks = Blocks()
    blocks.block.entering = Addend(0.5, Twice(initialize().tensor))
    found = blocks.run(2)
    assert blocks.calls == ["add_rms_norm", "route"]
    blocks.block.entering = Addend(0.5, initialize().tensor)
    expected = blocks.run(2, factor=2.0)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_behind_experts_adds_up_their_pairs(ranks: int) -> None:
    """On one rank, with the bits of two kernels."""
    layer, norm = layer_of(config_of(GATED, GATED)), RMSNorm(WIDTH, 1e-5, torch.float32)
    norm.weight.fill_(0.5)
    kernels: Any = replace(REFERENCE, experts=triton, norm=triton_norm)
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, 20, WIDTH, generator=generator)
    caches: Any = None
    mixed = layer(x, KernelPlans(caches, kernels))
    assert not isinstance(mixed, Tensor)
    alone = initialize().tensor
    group = alone if ranks == 1 else Twice(alone)
    found = norm.after_adding(mixed, residual.clone(), 0.5, kernels, group)
    expected = norm.after_adding(mixed.sum(), residual.clone(), 0.5, kernels, group)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        assert torch.equal(ours, theirs)


class Twice(RankGroup):
    """Of two ranks that have the same."""

    def __init__(self, alone: RankGroup) -> None:
        self.__dict__.update(vars(alone), size=2)

    def shared_rows(self, *_: Any) -> None:
        return None

    def all_reduce(self, values: Tensor) -> Tensor:
        return values + values
