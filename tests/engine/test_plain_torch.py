"""Models whose recurrences are in plain torch alone: which kernels they get, what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, EngineConfig
from megatron_hybrid.engine.plain_torch import kernels_for
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from tests.tiny_models import make_tiny_model

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rwkv")
    make_tiny_model("rwkv", folder)
    return folder


def test_on_a_gpu_they_run_on_the_references_kernels_and_say_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, model = EngineConfig(load=str(folder)), ModelFolder.open(folder).config
    with caplog.at_level(logging.WARNING):
        assert kernels_for(config, model, CPU) == "auto" and not caplog.records
        assert kernels_for(config, model, GPU) == "reference"
    assert "rwkv" in caplog.text and "--kernels reference" in caplog.text
    make_tiny_model("lfm2", tmp_path)
    assert kernels_for(config, ModelFolder.open(tmp_path).config, GPU) == "auto"


def test_so_do_models_with_wide_heads_of_attention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zamba-7B's have 464 numbers."""
    shape = Path(__file__).parents[2] / "configs" / "models" / "zamba-7b"
    config, model = EngineConfig(load=str(shape)), ModelFolder.open(shape).config
    with caplog.at_level(logging.WARNING):
        assert kernels_for(config, model, CPU) == "auto"
        assert kernels_for(config, model, GPU) == "reference"
    assert "attention heads of 464 numbers, more than 256" in caplog.text
    make_tiny_model("zamba", tmp_path)
    assert kernels_for(config, ModelFolder.open(tmp_path).config, GPU) == "auto"


def test_kernels_of_libraries_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--kernels is libraries, but the model \(rwkv\)"):
        LLM(str(folder), kernels="libraries")


@pytest.mark.parametrize(
    "options",
    [
        {"mamba_inference_ssm_states_dtype": "bfloat16"},
        {
            "mamba_inference_ssm_states_dtype": "float16",
            "mamba_inference_stochastic_rounding": True,
        },
        {"mamba_inference_cached_states_dtype": "int8"},
    ],
    ids=str,
)
def test_states_with_exponents_are_not_rounded(folder: Path, options: dict[str, object]) -> None:
    flag = next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"--{flag} is .* must be in float32"):
        LLM(str(folder), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "plain"), [("rwkv", "key"), ("xlstm", "gates")])
def test_exponents_come_from_weights_that_are_not_rounded(
    family: str, plain: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    model = LLM(str(tmp_path), quantization="fp8").engine.runner._model  # type: ignore[attr-defined]
    first, second = model.blocks[0].mixer, model.blocks[1].mixer
    assert all(format is None for format, _ in getattr(first, plain).formats)
    others = [first.value, second.key] if family == "rwkv" else [first.in_proj, second.up_proj]
    assert not any(format is None for layer in others for format, _ in layer.formats)


def test_states_of_the_host_are_not_rounded(folder: Path) -> None:
    config = EngineConfig(load=str(folder), prefix_caching_host_states_dtype="int8")
    with pytest.raises(ConfigurationError, match="--prefix-caching-host-states-dtype is int8"):
        kernels_for(config, ModelFolder.open(folder).config, CPU)
