"""--kernels libraries and what does not go together with it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.checks import check_libraries
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set


def check(pattern: str, conv: tuple[int, int] = (64, 3), **options: Any) -> None:
    """As when an engine with such a model is built for a GPU."""
    config = EngineConfig(kernels="libraries", **options)
    shapes: Any = SimpleNamespace(
        config=SimpleNamespace(pattern=pattern, model_type="some_model"),
        stages=SimpleNamespace(state_specs={0: SimpleNamespace(conv_shape=conv)}),
    )
    check_libraries(config, shapes, torch.device("cuda"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set, "missing_libraries", lambda needed: [])
    monkeypatch.setattr(kernel_set, "select", lambda name, device: kernel_set.REFERENCE)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the device is a cpu; mamba-ssm and .* a GPU"):
        build_engine(EngineConfig(kernels="libraries", device="cpu"))


@pytest.mark.parametrize(
    ("pattern", "conv", "options", "sentence"),
    [
        ("G*", (64, 3), {}, r"the model \(some_model\) has layers with a gated delta rule"),
        ("*-", (64, 3), {}, r"the model \(some_model\) has no layer that mamba-ssm"),
        ("M*", (64, 3), {"num_speculative_tokens": 2}, "--num-speculative-tokens is 2"),
        (
            "M*",
            (64, 3),
            {"mamba_inference_state_write_interval": 4},
            "--mamba-inference-state-write-interval is 4 and must be 1",
        ),
        (
            "M*",
            (64, 3),
            {
                "mamba_inference_stochastic_rounding": True,
                "mamba_inference_ssm_states_dtype": "float16",
            },
            "leave out --mamba-inference-stochastic-rounding",
        ),
        ("M*", (60, 3), {}, "60 channels on a rank and width 4; .* multiples of 8 channels"),
        ("C*", (64, 4), {}, "width 5; .* widths 2 to 4"),
    ],
)
def test_what_they_do_not_compute_is_refused_by_name(
    pattern: str, conv: tuple[int, int], options: dict[str, Any], sentence: str, installed: None
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check(pattern, conv, **options)


@pytest.mark.parametrize("pattern", ["M*", "S", "C*", "H", "MZ"])
def test_what_they_compute_is_taken(pattern: str, installed: None) -> None:
    check(pattern)
    check(pattern, mamba_inference_state_write_interval=1)


@pytest.mark.parametrize(
    ("pattern", "missing", "sentence"),
    [
        ("M*", {"mamba_ssm"}, "mamba-ssm is not installed; `pip install .* mamba-ssm` brings it"),
        (
            "S",
            {"mamba_ssm", "causal_conv1d"},
            "causal-conv1d and mamba-ssm are not installed; .* causal-conv1d mamba-ssm` .* them",
        ),
        ("C*", {"causal_conv1d"}, "causal-conv1d is not installed"),
    ],
)
def test_where_they_are_not_installed_the_error_says_what_brings_them(
    pattern: str, missing: set[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernel_set, "missing_libraries", lambda needed: [name for name in needed if name in missing]
    )
    with pytest.raises(ConfigurationError, match=sentence):
        check(pattern)


def test_only_what_a_model_needs_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(kernel_set, "missing_libraries", lambda needed: asked.append(needed) or [])
    monkeypatch.setattr(kernel_set, "select", lambda name, device: kernel_set.REFERENCE)
    check("C*")
    assert asked == [["causal_conv1d"]]


def test_half_an_installation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_set, "missing_libraries", lambda needed: [])
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    monkeypatch.delitem(sys.modules, "megatron_hybrid.kernels.causal_conv1d.library", raising=False)
    with pytest.raises(
        ConfigurationError, match=r"cannot be imported \(\w*Error: .*for this torch"
    ):
        check("M*")
