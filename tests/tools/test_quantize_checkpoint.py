"""tools/quantize_checkpoint.py: what it writes means the source rounded to the nearest, and is read
as any other folder of compressed-tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convert.quantize import SCHEMES, quantize_folder
from megatron_hybrid import ConfigurationError
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.models.conftest import load, random_tokens
from tests.models.driver import run_in_segments
from tests.quantized_folders import read
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES, make_tiny_model

# Experts one by one, or in one tensor with gates, as the family or transformers has them; a layer
# that several share.
SOME = ("nemotron_h_moe", "qwen3_5_moe", "granite_moe_hybrid", "zamba2")
GROUP = 32


@pytest.fixture(scope="module")
def alone() -> ParallelContext:
    return initialize()


@A_THIRD
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", usually(SOME, FAMILIES))
def test_the_engine_reads_it_with_the_error_of_the_rounding(
    family: str, scheme: str, tmp_path: Path, alone: ParallelContext
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(family, source)
    quantize_folder(source, target, scheme, group_size=GROUP, progress=False)
    plain, rounded = load(source, alone), load(target, alone)
    kinds = rounded.weight_bytes()
    wanted = "float8_e4m3fn" if scheme == "fp8" else "uint4"
    assert any(wanted in name for name in kinds)
    assert sum(kinds.values()) < 0.75 * sum(plain.weight_bytes().values())
    tokens = random_tokens(40)
    expected = run_in_segments(plain, tokens, [])
    error = (run_in_segments(rounded, tokens, []) - expected).std() / expected.std()
    assert 0.001 < error < (0.25 if scheme == "fp8" else 0.6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_is_the_nearest_number(scheme: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model("nemotron_h", source)
    quantize_folder(source, target, scheme, group_size=GROUP, max_shard_bytes=20000, progress=False)
    before = load_file(source / "model.safetensors")
    after = read(target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    packed = [name for name in after if name.endswith("weight_scale")]
    assert len(packed) == 4 + 2 * 2 + 4  # two Mamba layers, attention, two MLPs
    for name in packed:
        module = name.removesuffix(".weight_scale")
        weight, scale = before[f"{module}.weight"], after[name].float()
        if scheme == "fp8":
            meaning = after[f"{module}.weight"].float() * scale
            step = scale * 32  # of e4m3 from 256 to its largest number
        else:
            words = after[f"{module}.weight_packed"]
            codes = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).flatten(1) - 8
            step = scale.repeat_interleave(GROUP, 1)
            meaning = codes * step
            assert after[f"{module}.weight_shape"].tolist() == list(weight.shape)
        inside = (meaning - weight.float()).abs() <= step * 0.51
        assert inside.all()
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_it(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "source", tmp_path / "target"
    ours = make_tiny_model("nemotron_h", source)
    quantize_folder(source, target, scheme, group_size=GROUP, progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.tensor([random_tokens(40)])
    with torch.no_grad():
        expected, actual = ours(tokens).logits, theirs(tokens).logits
    assert (actual - expected).std() / expected.std() < 0.6


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model("nemotron_h", source)
    quantize_folder(source, target, "fp8", progress=False)
    with pytest.raises(ConfigurationError, match="is not an empty folder"):
        quantize_folder(source, target, "fp8", progress=False)
    with pytest.raises(ConfigurationError, match="in 16 or 32 bits"):
        quantize_folder(target, tmp_path / "again", "fp8", progress=False)
    with pytest.raises(ConfigurationError, match="--group-size 1000 divides"):
        quantize_folder(source, tmp_path / "odd", "w4a16", group_size=1000, progress=False)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    make_tiny_model("lfm2", tmp_path / "source")
    tool = Path(__file__).parents[2] / "tools" / "quantize_checkpoint.py"
    arguments = ["--from", str(tmp_path / "source"), "--to", str(tmp_path / "target")]
    monkeypatch.setattr(sys, "argv", [str(tool), *arguments, "--scheme", "fp8", "--quiet"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    assert ended.value.code == 0
    assert (tmp_path / "target" / "model.safetensors").is_file()
