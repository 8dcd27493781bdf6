"""--transformer-impl and what does not go together with it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import _Plan, build_engine
from megatron_hybrid.engine.build_weights import bytes_of_copies
from megatron_hybrid.engine.checks import check_transformer_engine
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.layers.linear import LinearPart


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


def check(dtype: torch.dtype = torch.bfloat16, is_quantized: bool = False, **options: Any) -> None:
    """As when an engine with such a model is built for a GPU."""
    config = EngineConfig(transformer_impl="transformer_engine", **options)
    shapes = SimpleNamespace(dtype=dtype, is_quantized=is_quantized)
    check_transformer_engine(config, shapes, torch.device("cuda"))  # type: ignore[arg-type]


def test_a_cpu_is_refused() -> None:
    config = EngineConfig(transformer_impl="transformer_engine", device="cpu")
    with pytest.raises(ConfigurationError, match="the device is a cpu; it needs a GPU"):
        build_engine(config)


def test_where_it_is_not_installed_the_error_says_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_set, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigurationError, match="pip install .* transformer-engine"):
        check()
    monkeypatch.setattr(kernel_set, "has_transformer_engine", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # half an installation
    with pytest.raises(
        ConfigurationError, match=r"cannot be imported \(\w*Error: .*for this torch"
    ):
        check()


def test_models_that_it_does_not_compute_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="the checkpoint is quantised; leave the flag out"):
        check(is_quantized=True)
    with pytest.raises(ConfigurationError, match="is in float32, .*--dtype bfloat16"):
        check(dtype=torch.float32)


@pytest.mark.parametrize(
    ("recipe", "capability", "sentence"),
    [
        ("tensorwise", (8, 6), "--fp8-recipe tensorwise needs .* 8.9 or newer; cuda has 8.6"),
        (None, (8, 9), "--fp8-format e4m3 needs .* 9.0 or newer; cuda has 8.9"),
        ("blockwise", (8, 9), "--fp8-format e4m3 --fp8-recipe blockwise needs .* 9.0 or newer"),
    ],
)
def test_gpus_without_such_products_are_refused(
    recipe: str | None,
    capability: tuple[int, int],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_set, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(kernel_set, "import_transformer_engine", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigurationError, match=sentence):
        check(fp8_format="e4m3", fp8_recipe=recipe)
    check()  # in 16 bits


def test_copies_in_fp8_are_part_of_what_weights_take() -> None:
    """Of the linear layers alone, and before anything is loaded."""
    config = EngineConfig(transformer_impl="transformer_engine", fp8_format="e4m3", device="cpu")
    shapes = _Plan.of(EngineConfig(device="cpu")).shapes
    own = sum(
        part.size * part.layer.inputs
        for _, part in shapes.weight_parts()
        if isinstance(part, LinearPart) and part.role != "lm_head"
    )
    assert bytes_of_copies(config, shapes) == own > 0
    assert bytes_of_copies(EngineConfig(device="cpu"), shapes) == 0
