"""The model that verify compares with is transformers', in whatever parts it is in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba

from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weight_source import open_folder
from megatron_hybrid.models.checkpoints.weights import ON_THE_FLY
from megatron_hybrid.verify.dequantized import Weight, formats_by_layer, weights_of
from megatron_hybrid.verify.oracle import Oracle, OracleUnavailable, ties_layers
from megatron_hybrid.verify.rounding import Roundings
from tests.models.test_text_parts import make_whole
from tests.quantized_folders import FORMATS, write
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES, make_tiny_model

CPU = torch.device("cpu")
SEQUENCES = [tuple(range(3, 73)), tuple(range(90, 123))]
SOME = [("qwen3_5_moe", "gptq"), ("nemotron_h_moe", "compressed_nvfp4")]
WITH_EXPERTS = ("qwen3_5_moe", "nemotron_h_moe", "granite_moe_hybrid")
EVERY = [(family, format) for format in FORMATS for family in WITH_EXPERTS]


def ours(folder: Path, *, by_layer: bool) -> list[Tensor]:
    found = ModelFolder.open(folder)
    with open_folder(found, found.config) as source:
        oracle = Oracle(
            str(folder), weights_of(source), device=CPU, dtype=torch.float32, by_layer=by_layer
        )
        assert oracle.is_by_layer == by_layer
        return list(oracle.logprobs(SEQUENCES))


def theirs(folder: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([one]), use_cache=False).logits[0] for one in SEQUENCES]
    return [torch.log_softmax(one.float(), -1) for one in logits]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", usually(("jamba", "qwen3_next"), FAMILIES))
def test_whole_and_layer_by_layer_it_is_transformers(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    expected = theirs(tmp_path)
    assert_same(ours(tmp_path, by_layer=False), expected)
    if not ties_layers(str(tmp_path)):
        assert_same(ours(tmp_path, by_layer=True), expected)


@A_THIRD
@pytest.mark.parametrize("kind", ["lfm2_vl", "nemotron_h_omni", "qwen3_5", "granite_speech"])
def test_of_a_model_that_sees_it_is_the_text_part(kind: str, tmp_path: Path) -> None:
    model = make_whole(kind, tmp_path)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([o]), use_cache=False).logits[0] for o in SEQUENCES]
    expected = [torch.log_softmax(one.float(), -1) for one in logits]
    assert_same(ours(tmp_path, by_layer=False), expected)
    assert_same(ours(tmp_path, by_layer=True), expected)


@pytest.mark.parametrize(("family", "format"), usually(SOME, EVERY))
def test_quantised_weights_are_what_they_mean(family: str, format: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path / "source")
    quantized, oracle = tmp_path / "quantized", tmp_path / "oracle"
    write(tmp_path / "source", format, quantized, oracle, block=(48, 32))
    assert_same(ours(quantized, by_layer=True), theirs(oracle))


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    found = ModelFolder.open(tmp_path)
    with open_folder(found, found.config) as source:
        weights = weights_of(source)
        del weights["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(OracleUnavailable, match="layers.1.mlp.up_proj"):
            Oracle(str(tmp_path), weights, device=CPU, dtype=torch.float32, by_layer=False)
        oracle = Oracle(str(tmp_path), weights, device=CPU, dtype=torch.float32, by_layer=True)
        with pytest.raises(OracleUnavailable, match="layer 1"):
            list(oracle.logprobs(SEQUENCES))


def test_packages_that_transformers_would_call_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba-ssm's kernels, say, which round float32 and need a GPU."""

    @functools.wraps(modeling_bamba.causal_conv1d_fn.__wrapped__)
    def installed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a package was asked")

    make_tiny_model("bamba", tmp_path)
    expected = theirs(tmp_path)
    monkeypatch.setattr(modeling_bamba, "causal_conv1d_fn", installed)
    assert_same(ours(tmp_path, by_layer=False), expected)
    assert modeling_bamba.causal_conv1d_fn is installed


def test_a_transformers_that_norms_all_groups_at_once_is_no_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before_5_23(self: Any, hidden_size: int, group_size: int, eps: float = 1e-6) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(hidden_size)), eps

    make_tiny_model("bamba", tmp_path)
    monkeypatch.setattr(modeling_bamba.BambaRMSNormGated, "__init__", before_5_23)
    with pytest.raises(OracleUnavailable, match="norms 2 groups of bamba at once"):
        ours(tmp_path, by_layer=False)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_experts_in_one_tensor_are_rounded_each_by_itself(quantization: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stacked = torch.randn(3, 130, 160, generator=generator)
    x = torch.randn(5, 160, generator=generator)
    format = ON_THE_FLY[quantization]
    roundings = Roundings(torch.float32, False, format)
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    found = roundings.noted(Weight(name, stacked.numel(), lambda: stacked)).read()
    for one, original in zip(found, stacked, strict=True):
        assert torch.equal(one, format.quantize(original).dequantize())
        with roundings:
            rounded = F.linear(x, one)
        assert 1e-3 < (rounded - F.linear(x, one)).norm() / rounded.norm() < 0.05


def test_formats_are_counted_without_numbers_of_layers_and_experts() -> None:
    def weight(name: str, format: str) -> Weight:
        return Weight(name, 1, lambda: torch.zeros(1), format=format)

    names = [f"model.layers.{i}.experts.{e}.w1.weight" for i in range(2) for e in range(3)]
    weights = [weight(name, "fp8") for name in names] + [weight("norm.weight", "")]
    assert formats_by_layer(weights) == {"model.layers.*.experts.*.w1.weight": {"fp8": 6}}
