"""megatron-core's layers beside the engine's in batch-invariant mode, with the same weights: which
bits are equal, and how far apart the others are; with the engine's kernels in them all are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.training import megatron
from tests.parallel.ranks import start_ranks

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron_layers")
    start_ranks(1, "tests.training.megatron_layers_worker", folder)
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return loaded


@DTYPES
def test_with_the_engine_s_kernels_a_megatron_model_has_its_bits(
    found: dict[str, Any], dtype: str
) -> None:
    """Also after a step of training, of which the engine got the weights from a checkpoint."""
    for name in ("with the engine's kernels", "after a step"):
        assert found[dtype][name]["largest"] == 0, name
    assert found[dtype]["the step"]["largest"] > 1e-3


def test_gradients_are_those_of_megatron_s_own_layers(found: dict[str, Any]) -> None:
    assert found["float32"]["gradients"] < 1e-5
    assert found["bfloat16"]["gradients"] < 0.1


@DTYPES
def test_its_own_layers_give_other_log_probabilities(found: dict[str, Any], dtype: str) -> None:
    most = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert 0 < found[dtype]["as it is"]["largest"] < most


@DTYPES
def test_layers_are_equal_or_within_some_last_places(found: dict[str, Any], dtype: str) -> None:
    """Products are the same library's, of other shapes."""
    assert found[dtype]["embedding"]["largest"] == 0
    for name in ("norm", "in_proj", "mixer", "attention", "mlp", "experts", "cross entropy"):
        assert found[dtype][name]["places"] <= 8, name
    if dtype == "bfloat16":  # a norm that is rounded twice, a gate in front of a rounding
        assert found[dtype]["norm"]["share"] > 0.1 and found[dtype]["mixer"]["share"] > 0.1


def test_what_is_not_supported_is_refused() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig

    class Model(torch.nn.Module):
        def __init__(self, positions: str, **options: Any) -> None:
            super().__init__()
            self.config = TransformerConfig(
                num_layers=1, hidden_size=16, num_attention_heads=2, **options
            )
            self.position_embedding_type, self.pre_process = positions, True
            self.norm = torch.nn.LayerNorm(16)

    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    for model, message in (
        (Model("rope", **none), "rotary embeddings"),
        (Model("none"), "dropout"),
        (Model("none", **none), "LayerNorm"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            megatron.compute_as_engine(model)
