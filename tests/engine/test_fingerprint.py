"""The fingerprint of an engine: what it is made of, and that it follows the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_hybrid import LLM
from megatron_hybrid.engine import build_fingerprint as building
from megatron_hybrid.errors import WeightsError
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.models.hybrid_model import HybridModel
from tests.thorough import A_THIRD
from tests.tiny_models import FAMILIES, make_tiny_model

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 4,
}
Folder = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A family's tiny model."""
    made: dict[tuple[str, int], str] = {}

    def get(family: str = "bamba", seed: int = 1) -> str:
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp(f"{family}_{seed}")
            make_tiny_model(family, path, seed=seed)
            made[family, seed] = str(path)
        return made[family, seed]

    return get


def make(load: str, **options: Any) -> LLM:
    return LLM(load, **OPTIONS | options)


def model_of(llm: LLM) -> HybridModel:
    return llm.engine.runner._model  # type: ignore[attr-defined, no-any-return]


def test_it_follows_the_weights_and_comes_back_with_them(folder: Folder) -> None:
    a, b = folder(), folder(seed=2)
    llm = make(a)
    old = llm.system_fingerprint
    assert re.fullmatch(r"fp_[0-9a-f]{16}", old)
    assert make(a).system_fingerprint == old
    llm.update_weights(b)
    new = llm.system_fingerprint
    assert new == make(b).system_fingerprint != old
    with pytest.raises(WeightsError):
        llm.update_weights({"x": torch.zeros(1)})
    assert llm.system_fingerprint == new
    llm.update_weights(load_file(f"{a}/model.safetensors"))
    assert llm.system_fingerprint == old


def test_one_weight_that_is_updated_alone_changes_it(folder: Folder) -> None:
    llm, weights = make(folder()), load_file(f"{folder()}/model.safetensors")
    old, (name, tensor) = llm.system_fingerprint, next(iter(weights.items()))
    changed = tensor.clone()
    changed.view(-1)[0] = torch.nextafter(changed.view(-1)[0], torch.tensor(torch.inf))
    llm.update_weights({name: changed})
    assert llm.system_fingerprint != old
    llm.update_weights({name: tensor})
    assert llm.system_fingerprint == old


@A_THIRD
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_model_is_in_it(family: str, folder: Folder) -> None:
    model = model_of(make(folder(family)))
    within = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in model.parameters()]
    for block, part in model.weight_parts():
        target = part.target
        found = target.tensors().values() if isinstance(target, QuantizedWeight) else [target]
        for tensor in found:
            assert isinstance(tensor, Tensor)
            first = tensor.data_ptr()
            assert any(start <= first < stop for start, stop in within), (block, part.role)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"mamba_inference_ssm_states_dtype": "bfloat16"},
        {"mamba_inference_conv_states_dtype": "bfloat16"},
        {"mamba_inference_cached_states_dtype": "int8"},
        {"mamba_inference_state_write_interval": 2},
        {"kernels": "reference"},
        {"inference_dynamic_batching_block_size": 32},
    ],
)
def test_what_changes_bits_changes_it(options: dict[str, Any], folder: Folder) -> None:
    one, other = (
        make(folder()).engine.weights.fingerprint,
        make(folder(), **options).engine.weights.fingerprint,
    )
    assert one.short != other.short
    assert one.parts["mode"] != other.parts["mode"]
    for part in ("device", "versions"):
        assert one.parts[part] == other.parts[part]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 7},
        {"dtype": "float32"},  # what it is without
        {"inference_dynamic_batching_max_requests": 8},
        {"inference_dynamic_batching_max_tokens": 64},
        {"inference_dynamic_batching_prefix_caching": False},
    ],
)
def test_what_does_not_change_bits_does_not_change_it(
    options: dict[str, Any], folder: Folder
) -> None:
    assert make(folder(), **options).system_fingerprint == make(folder()).system_fingerprint


def test_the_device_is_in_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make(folder()).system_fingerprint
    monkeypatch.setattr(building, "_cpu_name", lambda: "another one")
    found = make(folder())
    assert found.system_fingerprint != old
    assert found.engine.weights.fingerprint.parts["device"] == {
        "name": "another one",
        "vector_level": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def test_the_start_log_has_it_in_one_line(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "megatron_hybrid.engine"):
        llm = make(folder())
    (line,) = [one for one in caplog.messages if llm.system_fingerprint in one]
    assert "\n" not in line and f"torch {torch.__version__}" in line and "dtype float32" in line
