"""`megatron-hybrid verify` finds nothing wrong on a GPU: in 16 bits, with weights in FP8, and by
layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_hybrid import cli
from tests.quantized_folders import write
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = ("--device", "cuda", "--inference-dynamic-batching-buffer-size-gb", "0.5")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 32}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--oracle", "layers"),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "fp8_e4m3"),
        ("--mamba-inference-cached-states-dtype", "int8"),
    ],
)
def test_the_reference_model_is_right(tmp_path: Path, flags: tuple[str, ...]) -> None:
    report = tmp_path / "report.json"
    code = cli.main(["verify", *SMALL, *flags, "--report", str(report)])
    found = json.loads(report.read_text())
    assert code == 0, [check for check in found["checks"] if check["outcome"] == "differs"]
    assert found["speed"]["decode_limit"] > found["speed"]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("format", ["fp8_block", "modelopt_mixed", "compressed_w4a16"])
def test_a_quantised_folder_is_right(tmp_path: Path, format: str) -> None:
    make_tiny_model("nemotron_h", tmp_path / "source", eos_token_id=0, **SIZES)
    write(tmp_path / "source", format, tmp_path / "quantized", tmp_path / "oracle")
    load = ("--load", str(tmp_path / "quantized"), "--dtype", "bfloat16")
    assert cli.main(["verify", *SMALL, *load, "--no-speed"]) == 0
