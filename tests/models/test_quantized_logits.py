"""Logits of quantised checkpoints equal transformers' with what their weights mean, and where
inputs are quantised too, transformers' with inputs rounded in the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import load, random_tokens
from tests.models.driver import run_in_segments
from tests.quantized_folders import FORMATS, stack_experts, write
from tests.rounded_activations import RoundedActivations
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES, make_tiny_model

SHOWN = ("nemotron_h", "qwen3_5_moe", "lfm2")  # of those whose inputs are rounded
# Several blocks in a weight, the last rows ragged; None where the format has no blocks.
BLOCK = (48, 32)
# The root mean square of a number's relative rounding error. e4m3 has steps of 1/8 between powers
# of two: 1/8 / sqrt(12) of the lower one, which numbers exceed by a factor of 1.4 in the mean. Of
# int8 with the largest of a row at 127 it is 1 / sqrt(12) of 127 / 3.5, where a row's largest is
# about 3.5 times its root mean square.
ROUNDING = {"fp8": 0.026, "int8": 0.008}
# Roundings one after the other from the embedding to the last norm: two linears of each mixer, two
# of each MLP. Independent errors add like their squares.
IN_SEQUENCE = {"nemotron_h": 10, "qwen3_5_moe": 16, "lfm2": 16}
# Rounding an input may send a token to another expert.
MARGIN = {"nemotron_h": 1.0, "qwen3_5_moe": 1.5, "lfm2": 1.0}

WITH_ROUNDED_INPUTS = tuple(f for f in FORMATS if "fp8" in f or "int8" in f or "mixed" in f)
WEIGHT_ONLY = tuple(f for f in FORMATS if f not in WITH_ROUNDED_INPUTS)

EACH = [(family, format) for format in WEIGHT_ONLY for family in FAMILIES]
SOME = [
    ("nemotron_h", "compressed_w4a16"),
    ("qwen3_5_moe", "compressed_nvfp4"),
    ("nemotron_h", "gptq_act_order"),
    ("lfm2", "awq"),
    ("granite_moe_hybrid", "modelopt_nvfp4"),
]
SEVERAL_ROUNDED = [(family, format) for format in WITH_ROUNDED_INPUTS for family in SHOWN]
SOME_ROUNDED = [
    ("qwen3_5_moe", "fp8_block"),
    ("nemotron_h", "modelopt_fp8"),
    ("qwen3_5_moe", "modelopt_mixed"),
    ("lfm2", "compressed_int8"),
]


class Quantized(NamedTuple):
    """A quantised folder in the engine, and its oracle in transformers."""

    quantized: Path
    oracle: Path
    ours: HybridModel
    theirs: PreTrainedModel
    columns: int | None  # of the inputs that share a scale; None: the whole token, or static

    def expected(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.theirs(torch.tensor([tokens]), use_cache=False).logits
        return logits[0]

    def rounded(self, tokens: list[int], noise: float = 0, seed: int = 0) -> Tensor:
        """With rounded inputs."""
        rounding = RoundedActivations(self.quantized, self.oracle, self.columns, noise, seed)
        with rounding:
            return self.expected(tokens)


Make = Callable[[str, str], Quantized]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, parallel: ParallelContext) -> Make:
    made: dict[tuple[str, str], Quantized] = {}
    sources: dict[str, Path] = {}

    def get(family: str, format: str) -> Quantized:
        if family not in sources:
            sources[family] = tmp_path_factory.mktemp(family)
            make_tiny_model(family, sources[family])
        if (family, format) not in made:
            root = tmp_path_factory.mktemp(f"{family}-{format}")
            group = 8 if family == "zamba2" else 16  # as wide as its adapters
            write(
                sources[family], format, root / "quantized", root / "oracle", block=BLOCK,
                group=group,
            )  # fmt: skip
            made[family, format] = Quantized(
                root / "quantized",
                root / "oracle",
                load(root / "quantized", parallel),
                transformers_model(root / "oracle"),
                BLOCK[1] if "block" in format else None,
            )
        return made[family, format]

    return get


def transformers_model(folder: Path) -> Any:
    """Experts one after the other, each with linears that RoundedActivations recognises."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model.eval()


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize(("family", "format"), usually(SOME, EACH))
def test_weights_alone_are_computed_with_exactly(make: Make, family: str, format: str) -> None:
    model, tokens = make(family, format), random_tokens(60)
    expected = model.expected(tokens)
    for lengths in ([], [16, 30, 1, 1]):
        close(run_in_segments(model.ours, tokens, lengths), expected, 2e-5)


@A_THIRD
@pytest.mark.parametrize(("family", "format"), usually(SOME_ROUNDED, SEVERAL_ROUNDED))
def test_inputs_are_rounded_as_the_format_says(make: Make, family: str, format: str) -> None:
    model = make(family, format)
    tokens, expected = calm_prompt(model)
    for lengths in ([], [3, 2, 1, 1]):
        close(run_in_segments(model.ours, tokens, lengths), expected, 1e-3)


def calm_prompt(model: Quantized) -> tuple[list[int], Tensor]:
    """Tokens none of whose inputs lies on an edge between two numbers that it could be rounded to,
    and the logits. Sums in another order differ by some 1e-7, and an input on such an edge may
    then be rounded either way: a step of 1/16, that later layers and tokens make another result
    of. So the prompt is one whose logits stay as they are when every input moves by 1e-6."""
    for seed in range(100):
        tokens = random_tokens(8, seed)
        logits = model.rounded(tokens)
        moved = [model.rounded(tokens, noise=1e-6, seed=draw) for draw in range(4)]
        if all((other - logits).abs().max() < 3e-4 * logits.abs().max() for other in moved):
            return tokens, logits
    raise AssertionError("every prompt has an input on an edge")


@pytest.mark.parametrize(("family", "format"), usually(SOME_ROUNDED, SEVERAL_ROUNDED))
def test_rounded_inputs_cost_no_more_than_the_roundings_add_up_to(
    make: Make, family: str, format: str
) -> None:
    """Whatever the inputs' scales are taken over: 8 % of the logits' spread for FP8 in five layers
    of two linears, and 2.5 % for INT8."""
    model, tokens = make(family, format), random_tokens(60)
    expected, actual = model.expected(tokens), run_in_segments(model.ours, tokens, [16, 30, 1])
    error = float((actual - expected).std() / expected.std())
    rounding = ROUNDING["int8" if "int8" in format else "fp8"]
    assert error < MARGIN[family] * rounding * IN_SEQUENCE[family] ** 0.5
    theirs = float((model.rounded(tokens) - expected).std() / expected.std())
    assert 0.5 < error / theirs < 2


IN_ONE_TENSOR = ("compressed_fp8_channel", "fp8_block", "compressed_w4a16_asymmetric")


@pytest.mark.parametrize(
    ("family", "format"),
    usually(
        [("granite_moe_hybrid", "compressed_fp8_channel"), ("qwen3_5_moe", "fp8_block")],
        [
            (family, format)
            for family in ("granite_moe_hybrid", "qwen3_5_moe", "nemotron_h_moe")
            for format in IN_ONE_TENSOR
        ],
    ),
)
def test_experts_in_one_tensor_are_those_that_are_single(
    family: str, format: str, tmp_path: Path, parallel: ParallelContext
) -> None:
    make_tiny_model(family, tmp_path / "source")
    write(tmp_path / "source", format, tmp_path / "single", tmp_path / "oracle", block=(16, 16))
    stack_experts(tmp_path / "single", tmp_path / "stacked")
    single, stacked = (load(tmp_path / name, parallel) for name in ("single", "stacked"))
    assert single.weight_bytes() == stacked.weight_bytes()
    logits = [run_in_segments(model, random_tokens(40), []) for model in (single, stacked)]
    assert torch.equal(*logits)
