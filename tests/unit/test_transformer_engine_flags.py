"""--transformer-impl and what does not go together with it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fp8_recipe": "blockwise"}, "--fp8-format, which it is about, is not given"),
        ({"fp8_format": "e4m3"}, "--transformer-impl is local"),
        ({"transformer_impl": "megatron"}, "transformer-impl"),
        ({"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}, "fp8-format"),
        (
            {
                "transformer_impl": "transformer_engine",
                "fp8_format": "e4m3",
                "fp8_recipe": "mxfp8",
            },
            "fp8-recipe",
        ),
        ({"transformer_impl": "transformer_engine", "quantization": "fp8"}, "--quantization fp8"),
        ({"transformer_impl": "transformer_engine", "kernels": "reference"}, "--kernels reference"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        EngineConfig(**options)


def test_a_cpu_is_refused() -> None:
    config = EngineConfig(transformer_impl="transformer_engine", device="cpu")
    with pytest.raises(ConfigurationError, match="the device is a cpu; it needs a GPU"):
        build_engine(config)


def test_where_it_is_not_installed_the_error_says_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from megatron_hybrid.engine import checks
    from megatron_hybrid.kernels import kernel_set

    class Shapes:
        is_quantized = False

    monkeypatch.setattr(kernel_set, "has_transformer_engine", lambda: False)
    config = EngineConfig(transformer_impl="transformer_engine")
    with pytest.raises(ConfigurationError, match="pip install transformer-engine"):
        checks.check_transformer_engine(config, Shapes(), torch.device("cuda"))  # type: ignore[arg-type]
    Shapes.is_quantized = True
    with pytest.raises(ConfigurationError, match="the checkpoint is quantised"):
        checks.check_transformer_engine(config, Shapes(), torch.device("cuda"))  # type: ignore[arg-type]
