"""What measuring the largest step leaves on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.build import load_weights
from megatron_hybrid.engine.profiling import measure_activations
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.parallel import initialize
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"block_size": 16, "max_requests": 8, "max_tokens": 256, "max_seq_length": 128}


@pytest.mark.parametrize("family", ["bamba", "granite_moe_hybrid", "qwen3_next"])
def test_the_largest_step_leaves_what_kernels_keep_and_that_is_counted_once(
    family: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    model = load_weights(EngineConfig(load=str(tmp_path), device="cuda"))
    device = next(model.parameters()).device
    model.kernels = kernel_set.select("auto", device)

    def measure() -> tuple[int, int]:
        found = measure_activations(model, initialize(), device, **SIZES)
        return found, torch.cuda.memory_allocated(device)

    first, allocated = measure()
    # The second time kernels keep nothing more.
    second, allocated_again = measure()
    assert allocated_again == allocated
    assert first > 0
    assert abs(first - second) < 16 << 20
