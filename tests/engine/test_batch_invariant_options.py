"""Batch-invariant mode with other types, weights and drafters: each is the same as itself alone;
what can't be is refused in a sentence; and what would break it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron_hybrid import LLM, EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set, replay
from megatron_hybrid.kernels.experts import reference as experts
from megatron_hybrid.kernels.linear import reference as linear_reference
from megatron_hybrid.kernels.linear import whole_tiles
from tests.batch_invariant_breaks import break_attention, break_scans
from tests.engine.bits import (
    BLOCK_SIZE,
    DRAFTS,
    OPTIONS,
    REQUESTS,
    TOKENS,
    Known,
    params,
)
from tests.mtp_models import MTP_FAMILIES, make_mtp_model
from tests.quantized_folders import FORMATS, write
from tests.thorough import usually
from tests.tiny_models import FAMILIES, make_tiny_model

LENGTHS = usually((17, 32, 47), (15, 17, 32, 33, 47))
WANTED = params(tokens=usually(7, 21))


def joint(known: Known, wanted: Any = WANTED, **options: Any) -> None:
    """Cold and warm, in a batch, and in small chunks with what the first ones have left."""
    prompts = known.prompts
    llm = known.llm(**options)
    for _ in range(2):
        outputs = known.generate(llm, prompts, wanted)
    assert llm.stats()["skipped_tokens"] > 0
    turns = [o.prompt_token_ids + o.token_ids + known.text[:3] for o in outputs[1::2]]
    known.generate(llm, turns, params(tokens=3))
    known.generate(known.llm(**{TOKENS: 13, REQUESTS: 4}, **options), prompts[::-1], wanted)


@pytest.mark.parametrize(
    ("family", "dtype"),
    usually(
        [("nemotron_h_moe", "bfloat16"), ("lfm2", "float16")],
        [(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float16")],
    ),
)
def test_in_16_bits(family: str, dtype: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    joint(Known.at(tmp_path, LENGTHS, dtype=dtype))


def test_keys_and_values_in_fp8(tmp_path: Path) -> None:
    make_tiny_model("nemotron_h", tmp_path)
    joint(Known.at(tmp_path, LENGTHS, kv_cache_dtype="fp8_e4m3"))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
@pytest.mark.parametrize(
    "family", usually(("nemotron_h",), ("nemotron_h", "qwen3_5_moe", "lfm2", "zamba2"))
)
def test_weights_rounded_while_they_are_read(
    family: str, quantization: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    joint(Known.at(tmp_path, LENGTHS, quantization=quantization))


@pytest.mark.parametrize("format", usually(("modelopt_mixed",), FORMATS))
def test_weights_of_quantised_folders(format: str, tmp_path: Path) -> None:
    family = "nemotron_h"
    make_tiny_model(family, tmp_path / "plain")
    write(tmp_path / "plain", format, tmp_path / "quantised", tmp_path / "oracle")
    joint(Known.at(tmp_path / "quantised", LENGTHS))


@pytest.mark.parametrize("family", usually(("nemotron_h",), MTP_FAMILIES))
@pytest.mark.parametrize("number", usually([4], [1, 3, 8]))
def test_drafts_from_the_model_s_head(family: str, number: int, tmp_path: Path) -> None:
    make_mtp_model(family, tmp_path, agrees=True)
    known = Known.at(tmp_path, LENGTHS)
    options = {DRAFTS: number, "drafter": "heads"}
    joint(known, **options)
    llm = known.llm(**options)
    known.generate(llm, known.prompts, params(tokens=24))
    assert llm.stats()["accepted_tokens"] > 10


@pytest.mark.parametrize("family", ["nemotron_h", *usually((), ("qwen3_next", "jamba"))])
def test_more_drafts_than_a_block_has_tokens(family: str, tmp_path: Path) -> None:
    known = Known.of(family, tmp_path)
    known.prompts = known.prompts[5:9:2]
    joint(known, **{DRAFTS: 8, BLOCK_SIZE: 4})


def test_after_an_update_and_back_bits_are_what_they_were(tmp_path: Path) -> None:
    families = usually(("nemotron_h",), FAMILIES)
    for family in families:
        folders = [tmp_path / f"{family} {i}" for i in range(2)]
        both = []
        for i, folder in enumerate(folders):
            make_tiny_model(family, folder, seed=1 + i)
            both.append(Known.at(folder, LENGTHS[:2]))
        first, second = both
        llm = first.llm()
        first.generate(llm, first.prompts, WANTED)
        llm.update_weights(str(folders[1]))
        second.generate(llm, first.prompts, WANTED)
        llm.update_weights(load_file(folders[0] / "model.safetensors"))
        first.generate(llm, first.prompts, WANTED)
        first.generate(llm, first.prompts, WANTED)


REFUSED: dict[str, dict[str, Any]] = {
    "--mamba-inference-ssm-states-dtype bfloat16": {"mamba_inference_ssm_states_dtype": "bfloat16"},
    "--mamba-inference-ssm-states-dtype float16": {"mamba_inference_ssm_states_dtype": "float16"},
    "--mamba-inference-cached-states-dtype int8": {"mamba_inference_cached_states_dtype": "int8"},
    "--kernels libraries": {"kernels": "libraries"},
    "--transformer-impl transformer_engine": {"transformer_impl": "transformer_engine"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_depends_on_the_batch_is_refused(words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        EngineConfig(load="/nowhere", batch_invariant=True, **REFUSED[words])
    assert "--batch-invariant does not go together with" in str(error.value)
    assert words in str(error.value) and str(error.value).endswith(".")
    EngineConfig(load="/nowhere", batch_invariant=False, kernels="auto")


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_environment_can_ask_for_it(
    value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_HYBRID_BATCH_INVARIANT", value)
    assert EngineConfig(load="/nowhere").batch_invariant is wanted
    assert EngineConfig(load="/nowhere", batch_invariant=False).batch_invariant is False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_windows_of_convolutions_are_not_rounded_where_they_are_kept(
    dtype: str, tmp_path: Path
) -> None:
    """A type of fewer bits than the inputs have is refused."""
    make_tiny_model("nemotron_h", tmp_path)
    known = Known.at(tmp_path, LENGTHS, mamba_inference_conv_states_dtype=dtype)
    if dtype == "float32":
        joint(known)
        return
    with pytest.raises(ConfigurationError, match="--mamba-inference-conv-states-dtype"):
        known.llm()


def products_in_parts(patch: pytest.MonkeyPatch, parts: Callable[[int], int]) -> None:
    """Products of so many rows add up that many parts of K."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        count = parts(len(x))
        pairs = zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True)
        y = sum((F.linear(a, b) for a, b in pairs), x.new_zeros(len(x), len(weight)))
        return y if bias is None else y + bias

    own = kernel_set.REFERENCE_INVARIANT.linear
    names = ("multiply", "multiply_activated", "quantize_rows", "weights_changed")
    linears: Any = SimpleNamespace(**{name: getattr(own, name) for name in names})
    linears.multiply = partial(linear_reference.multiply, linear=linear)
    broken = replace(kernel_set.REFERENCE_INVARIANT, linear=linears)
    patch.setattr(kernel_set, "REFERENCE_INVARIANT", broken)


def break_tiles_of_products(patch: pytest.MonkeyPatch) -> None:
    """Another tile for few rows; whether a library's would have other bits, CPUs differ in."""
    products_in_parts(patch, lambda rows: 1 if rows < 16 else 2)


def break_sums_of_products(patch: pytest.MonkeyPatch) -> None:
    """K in as many parts as there are rows."""
    products_in_parts(patch, lambda rows: max(rows, 1))


def break_order_of_experts(patch: pytest.MonkeyPatch) -> None:
    """One after the other, the other way round with more than one token."""

    def mix(x: Any, chosen: Any, weights: Any, layer: Any, shared: Any = None) -> Any:
        order = chosen.argsort(dim=1, descending=len(weights) > 1)
        total: Any = 0
        for at in order.split(1, dim=1):
            total = total + experts.mix(
                x, chosen.gather(1, at), weights.gather(1, at), layer, None, whole_tiles.multiply
            )
        if shared is None:
            return total
        return experts.add_shared(total, shared, experts.plain_rows(x), whole_tiles.multiply)

    patch.setattr(kernel_set.experts_by_tiles, "mix", mix)


def break_resumption(patch: pytest.MonkeyPatch) -> None:
    """What is replayed is the tokens before: one place off."""
    original = replay._plan

    def plan(part: Any, chunk: int, ring_length: int, inner: Any) -> Any:
        found = original(part, chunk, ring_length, inner)
        return replace(found, replayed_places=(found.replayed_places + 1) % ring_length)

    patch.setattr(replay, "_plan", plan)


BREAKS = {
    break_tiles_of_products: "nemotron_h",
    break_sums_of_products: "nemotron_h",
    break_attention: "nemotron_h",
    break_scans: "qwen3_next",
    break_order_of_experts: "nemotron_h_moe",
    break_resumption: "jamba",
}


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_what_would_break_it_shows(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Known.of(BREAKS[change], tmp_path)
    prompts, wanted = [*known.prompts[-4:], known.text[:150]], params(tokens=5)
    known.learn(prompts, wanted)
    change(monkeypatch)
    outputs = LLM(str(tmp_path), **OPTIONS).generate(prompts, wanted, progress=False)
    assert list(known.differing(outputs, wanted))
    monkeypatch.undo()
    outputs = LLM(str(tmp_path), **OPTIONS).generate(prompts, wanted, progress=False)
    assert not list(known.differing(outputs, wanted))
