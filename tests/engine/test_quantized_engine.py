"""Engines with quantised weights: rounded while loading, updated in place, drawn at random, and
refused with one sentence where a folder is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.hybrid_model import HybridModel
from tests.quantized_folders import FORMATS, write
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 4,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3 + i, 60 + 7 * i)) for i in range(3)]


class Folders:
    """Tiny models in 16 or 32 bits, and quantised ones; each made once."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make
        self._made: dict[tuple[str, ...], Path] = {}

    def plain(self, family: str = "nemotron_h", seed: int = 1) -> Path:
        key = (family, str(seed))
        if key not in self._made:
            self._made[key] = self._make(family)
            make_tiny_model(family, self._made[key], seed=seed)
        return self._made[key]

    def quantized(self, format: str, family: str = "nemotron_h", seed: int = 1) -> Path:
        key = (family, format, str(seed))
        if key not in self._made:
            self._made[key] = self._make(format)
            write(self.plain(family, seed), format, self._made[key], self._make("oracle"))
        return self._made[key]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp)


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **OPTIONS | options)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


def model_of(llm: LLM) -> HybridModel:
    return llm.engine.runner._model  # type: ignore[attr-defined, no-any-return]


def values(llm: LLM) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model_of(llm).named_parameters()}


ROUNDINGS = ("fp8", "fp8_block")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value.view(torch.uint8), second[name].view(torch.uint8))
        for name, value in first.items()
        if value.dim()
    )


ROUNDED = [(family, name) for family in ("nemotron_h", "qwen3_5_moe", "lfm2") for name in ROUNDINGS]


@A_THIRD
@pytest.mark.parametrize(("family", "quantization"), usually(ROUNDED[::3] + ROUNDED[4:], ROUNDED))
def test_weights_are_rounded_while_they_are_read(
    family: str, quantization: str, folders: Folders
) -> None:
    exact = engine(folders.plain(family))
    rounded = engine(folders.plain(family), quantization=quantization)
    sizes = model_of(rounded).weight_bytes()
    formats = [name for name in sizes if "float8" in name]
    assert sizes["float32"] < model_of(exact).weight_bytes()["float32"] / 2
    # Blocks of tiny layers that are computed together may be smaller than 128x128.
    assert formats and all(("each row" in name) == (quantization == "fp8") for name in formats)
    cold = tokens(rounded)
    assert tokens(rounded) == cold  # now from the cache
    alone = engine(folders.plain(family), quantization=quantization)
    assert [tokens(alone, [prompt])[0] for prompt in PROMPTS] == cold
    in_chunks = engine(
        folders.plain(family),
        quantization=quantization,
        inference_dynamic_batching_max_tokens=16,
    )
    assert tokens(in_chunks) == cold


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_an_update_rounds_new_weights_in_place(quantization: str, folders: Folders) -> None:
    old, new = folders.plain(), folders.plain(seed=2)
    llm = engine(old, quantization=quantization)
    fresh = engine(new, quantization=quantization)
    places = {name: weight.data_ptr() for name, weight in model_of(llm).named_parameters()}
    assert not same(values(llm), values(fresh))
    llm.update_weights(str(new))
    assert same(values(llm), values(fresh))
    assert tokens(llm) == tokens(fresh)
    llm.update_weights(load_file(old / "model.safetensors"))
    assert same(values(llm), values(engine(old, quantization=quantization)))
    assert places == {name: w.data_ptr() for name, w in model_of(llm).named_parameters()}


@pytest.mark.parametrize("format", usually(["modelopt_mixed", "gptq"], FORMATS))
def test_an_update_from_a_quantised_folder(format: str, folders: Folders) -> None:
    llm = engine(folders.quantized(format))
    fresh = engine(folders.quantized(format, seed=2))
    llm.update_weights(str(folders.quantized(format, seed=2)))
    assert same(values(llm), values(fresh))
    assert tokens(llm) == tokens(fresh)


@pytest.mark.parametrize("format", usually(["modelopt_mixed", "compressed_w4a16"], FORMATS))
def test_random_weights_take_the_memory_of_the_format(format: str, folders: Folders) -> None:
    folder = folders.quantized(format, "qwen3_5_moe")
    drawn = engine(folder, load_format="dummy")
    read = engine(folder)
    assert model_of(drawn).weight_bytes() == model_of(read).weight_bytes()
    assert len(tokens(drawn)[0]) == 12
    assert drawn.engine.stats()["weight_bytes"] == model_of(read).weight_bytes()


def test_a_flag_beside_a_quantised_folder_is_refused(folders: Folders) -> None:
    with pytest.raises(ConfigurationError, match="--quantization is fp8, but .* leave the flag"):
        engine(folders.quantized("fp8_block"), quantization="fp8")


def broken(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def first(tensors: dict[str, Tensor], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(end))


def without_a_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[first(tensors, "weight_scale")]


def with_a_scale_too_many(tensors: dict[str, Tensor]) -> None:
    name = first(tensors, "weight_scale")
    tensors[name] = torch.cat((tensors[name], tensors[name]))


def with_nan(tensors: dict[str, Tensor]) -> None:
    tensors[first(tensors, "weight_scale")].fill_(float("nan"))


def without_half_an_expert(tensors: dict[str, Tensor]) -> None:
    del tensors[first(tensors, "experts.3.down_proj.weight")]


def not_quantised_after_all(tensors: dict[str, Tensor]) -> None:
    name = first(tensors, "in_proj.weight")
    tensors[name] = tensors[name].float()


BROKEN = {
    without_a_scale: "it has no scale",
    with_a_scale_too_many: "has shape .*; its configuration and its quantisation make it",
    with_nan: "NaN, infinite or negative",
    without_half_an_expert: "experts.3.down_proj.weight' is missing",
    not_quantised_after_all: "is torch.float32, but the configuration says that it is quantised",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_broken_folder_is_refused(
    change: Callable[[dict[str, Tensor]], None], folders: Folders, tmp_path: Path
) -> None:
    folder = folders.quantized("compressed_fp8_channel", "nemotron_h_moe")
    bad = broken(folder, tmp_path, change)
    with pytest.raises(WeightsError, match=BROKEN[change]):
        engine(bad)
    llm = engine(folder)
    before = values(llm)
    with pytest.raises(WeightsError, match=BROKEN[change]):
        llm.update_weights(str(bad))
    assert same(values(llm), before)  # nothing is half loaded


def test_what_a_configuration_forgets_to_leave_out_is_read_as_it_is(
    folders: Folders, tmp_path: Path
) -> None:
    """Some list no exclusions at all: the tensors tell."""
    folder = folders.quantized("modelopt_fp8", "nemotron_h")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "hf_quant_config.json"):
        if (path := tmp_path / name).is_file():
            described = json.loads(path.read_text())
            for key in ("quantization_config", "quantization"):
                described.get(key, {}).pop("ignore", None)
                described.get(key, {}).pop("exclude_modules", None)
            path.write_text(json.dumps(described))
    assert same(values(engine(tmp_path)), values(engine(folder)))
