"""Linear layers through Transformer Engine, against our own and against exact products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid import LLM, SamplingParams  # noqa: E402
from megatron_hybrid.kernels.linear.transformer_engine import TransformerEngineLinear  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402

RECIPES = [None, "tensorwise", "delayed", "blockwise"]
# e4m3's rounding, relative, root mean square: of weights and of inputs (2.6 % each).
TOLERANCE = {None: 6e-3, "tensorwise": 4.5e-2, "delayed": 4.5e-2, "blockwise": 4.5e-2}


def inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, columns, device="cuda", generator=generator)
    return x.bfloat16()


def close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float) -> None:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.shape == expected.shape and y.dtype == x.dtype
    assert (y.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (10304, 2688), (1040, 1184)])
def test_products(recipe: str | None, tokens: int, rows: int, columns: int) -> None:
    weight, bias = inputs(rows, columns, 1) * 0.02, inputs(1, rows, 2)[0]
    other = inputs(24, columns, 3)
    linear = TransformerEngineLinear(recipe, [weight])
    x = inputs(tokens, 2 * columns)[:, :columns]  # strided rows
    for given in (None, bias):
        close(linear.multiply(x, weight, given), x, weight, given, TOLERANCE[recipe])
    close(linear.multiply(x[:0], weight), x[:0], weight, None, 0)
    assert torch.equal(linear.multiply(x, other), F.linear(x, other))  # not one of its weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphs_follow_inputs_and_weights(recipe: str | None) -> None:
    weight, x = inputs(512, 256, 1) * 0.02, inputs(16, 256)
    linear = TransformerEngineLinear(recipe, [weight])
    for _ in range(2):
        linear.multiply(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear.multiply(x, weight)
    x.copy_(inputs(16, 256, 4) * 0.5)
    weight.copy_(inputs(512, 256, 5) * 0.1)
    linear.weights_changed()
    graph.replay()
    close(y, x, weight, None, TOLERANCE[recipe])


def test_delayed_scales_are_those_of_the_inputs_before() -> None:
    weight = inputs(256, 256, 1)
    linear = TransformerEngineLinear("delayed", [weight])
    x = inputs(16, 256)
    linear.multiply(x, weight)
    large = linear.multiply(x * 64, weight)  # beyond the largest number that the scale allows
    assert large.norm() < 0.5 * F.linear(x * 64, weight).norm()
    close(linear.multiply(x * 64, weight), x * 64, weight, None, TOLERANCE["delayed"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_answers_are_near_those_of_our_own_layers(
    tmp_path: Path, family: str, recipe: str | None
) -> None:
    make_tiny_model(family, tmp_path)
    prompts = [[3 + n, 5, 7, 11, 13 + n, 17] * (n + 2) for n in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    found = []
    for impl in ("local", "transformer_engine"):
        fp8 = {} if recipe is None else {"fp8_format": "e4m3", "fp8_recipe": recipe}
        llm = LLM(
            str(tmp_path),
            dtype="bfloat16",
            inference_dynamic_batching_buffer_size_gb=0.05,
            inference_dynamic_batching_max_requests=8,
            inference_dynamic_batching_prefix_caching_mamba_gb=0.01,
            transformer_impl=impl,
            **(fp8 if impl == "transformer_engine" else {}),
        )
        outputs = llm.generate(prompts, params)
        found.append([o.logprobs[0].logprob for o in outputs if o.logprobs])
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert max(differences) < (0.05 if recipe is None else 0.5)
