"""A checkpoint that does not fit is refused, naming the weight; one that fits in any of the usual
spellings loads."""

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

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.mtp_models import MTPOracle
from tests.tiny_models import make_tiny_model

Tiny = Callable[[str], TinyModel]


def copy_with(
    model: TinyModel | MTPOracle,
    folder: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Path:
    """A copy of the folder whose tensors went through `change`."""
    shutil.copy(model.folder / "config.json", folder)
    tensors = change(load_file(model.folder / "model.safetensors"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_missing_weight_is_named(tiny: Tiny, tmp_path: Path, parallel: ParallelContext) -> None:
    name = "model.layers.1.mamba.A_log"
    copy_with(tiny("bamba"), tmp_path, lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(WeightsError, match=f"'{name}' is missing"):
        load(tmp_path, parallel)


def test_an_extra_weight_is_named(tiny: Tiny, tmp_path: Path, parallel: ParallelContext) -> None:
    copy_with(tiny("bamba"), tmp_path, lambda t: t | {"model.layers.9.x": torch.zeros(2)})
    with pytest.raises(WeightsError, match="'model.layers.9.x' .* has no place in a bamba model"):
        load(tmp_path, parallel)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mamba.in_proj.weight", "model.embed_tokens.weight"]
)
def test_a_misshapen_weight_is_named(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext, name: str
) -> None:
    """One row too many is refused too, although every slice of ours would exist."""
    copy_with(tiny("bamba"), tmp_path, lambda t: t | {name: torch.cat((t[name], t[name][:1]))})
    with pytest.raises(WeightsError, match=rf"'{name}' has shape \[\d+, 64\]; .* makes it"):
        load(tmp_path, parallel)


def test_missing_files_are_named(tiny: Tiny, tmp_path: Path, parallel: ParallelContext) -> None:
    shutil.copy(tiny("llama").folder / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="neither model.safetensors nor"):
        load(tmp_path, parallel)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="model-00001-of-00002.safetensors, which is not in"):
        load(tmp_path, parallel)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "granite_moe_hybrid"])
def test_sharded_checkpoints_load(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext, family: str
) -> None:
    model, tokens = tiny(family), random_tokens(20)
    model.theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load(tmp_path, parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


def other_nemotron_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`model.` in place of `backbone.`, and each layer's experts stacked in one tensor; or back."""
    renamed, experts = {}, {}
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(".weight"):
            before, rest = name.split(".experts.")
            index, projection, _ = rest.split(".")
            stacked = before.replace("backbone.", "model.") + f".experts.{projection}"
            experts[stacked, int(index)] = tensor
        else:
            renamed[name.replace("backbone.", "model.")] = tensor
    for stacked in {name for name, _ in experts}:
        count = sum(name == stacked for name, _ in experts)
        renamed[stacked] = torch.stack([experts[stacked, i] for i in range(count)])
    return renamed


def other_granite_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    renamed = {}
    for name, tensor in tensors.items():
        before, moe, rest = name.partition("block_sparse_moe.")
        renamed[before + moe + names[rest] if moe else name] = tensor
    return renamed


@pytest.mark.parametrize(
    ("family", "rename"),
    [("nemotron_h_moe", other_nemotron_names), ("granite_moe_hybrid", other_granite_names)],
)
def test_both_spellings_of_expert_weights_load(
    tiny: Tiny,
    tmp_path: Path,
    parallel: ParallelContext,
    family: str,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    model, tokens = tiny(family), random_tokens(20)
    copy_with(model, tmp_path, rename)
    assert set(load_file(tmp_path / "model.safetensors")) != set(
        load_file(model.folder / "model.safetensors")
    )
    ours = load(tmp_path, parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


@pytest.mark.parametrize("family", ["jamba", "lfm2_moe", "qwen3_next", "qwen3_5_moe"])
def test_stacked_experts_load(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext, family: str
) -> None:
    """As transformers 5 has them in memory: all experts of a layer, gates with up projections."""

    def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stacked = {k: v for k, v in tensors.items() if ".experts." not in k}
        moes = {k[: k.index(".experts.")] for k in tensors if ".experts." in k}
        for moe in moes:
            count = sum(k.startswith(f"{moe}.experts.") for k in tensors) // 3
            names = (
                ("w1", "w3", "w2")
                if family == "lfm2_moe"
                else ("gate_proj", "up_proj", "down_proj")
            )
            gate, up, down = (
                torch.stack([tensors[f"{moe}.experts.{i}.{name}.weight"] for i in range(count)])
                for name in names
            )
            stacked[f"{moe}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            stacked[f"{moe}.experts.down_proj"] = down
        assert moes
        return stacked

    model, tokens = tiny(family), random_tokens(20)
    ours = load(copy_with(model, tmp_path, stack), parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


def test_the_text_part_of_a_model_with_vision_loads(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    model, tokens = tiny("qwen3_5"), random_tokens(20)

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
        unused = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight")
        return renamed | {name: torch.zeros(2, 2) for name in unused}

    copy_with(model, tmp_path, whole)
    text = json.loads((model.folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ours = load(tmp_path, parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


def test_shared_blocks_may_be_stored_once_for_each_use(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """Layers 1 and 4 of the six use the same block, and so do 3 and 5."""

    def repeat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            for first, second in ((1, 4), (3, 5)):
                own = f"model.layers.{first}.shared_transformer."
                if name.startswith(own):
                    copies[name.replace(f".{first}.", f".{second}.", 1)] = tensor.clone()
        assert copies
        return tensors | copies

    model, tokens = tiny("zamba2"), random_tokens(20)
    ours = load(copy_with(model, tmp_path, repeat), parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


def test_weights_without_a_use_are_ignored(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """Old rotary tables, a tied head written out, multi-token prediction."""
    granite = tmp_path / "granite"
    granite.mkdir()
    copy_with(
        tiny("granite_moe_hybrid"),
        granite,
        lambda t: (
            t
            | {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    load(granite, parallel)
    copy_with(
        tiny("nemotron_h"), tmp_path, lambda t: t | {"mtp.layers.0.norm.weight": torch.ones(64)}
    )
    load(tmp_path, parallel)


# ------------------------------------------------------------------ one weight, stored twice


def test_blocks_that_are_not_shared_are_refused(tmp_path: Path, parallel: ParallelContext) -> None:
    """transformers shares none without tie_word_embeddings; where all are the same, it is no other
    model."""
    theirs = make_tiny_model("zamba2", tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"layers\.1\.shared_.*layers\.4\.shared_.* different"):
        load(tmp_path, parallel)
    uses: Any = theirs.model.layers
    for first, second in ((1, 4), (3, 5)):
        block = uses[first].shared_transformer.state_dict()
        uses[second].shared_transformer.load_state_dict(block)
    theirs.save_pretrained(tmp_path)
    tokens = random_tokens(20)
    ours = run_in_segments(load(tmp_path, parallel), tokens, [])
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_what_no_shared_block_has_is_refused(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    name = "model.layers.1.shared_transformer.self_attn.q_proj.bias"
    copy_with(tiny("zamba2"), tmp_path, lambda t: t | {name: torch.ones(64)})
    with pytest.raises(WeightsError, match=f"'{name}' .* has no place"):
        load(tmp_path, parallel)


def test_a_tied_head_with_other_values_is_refused(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """transformers would not tie it."""
    model, embedding = tiny("granite_moe_hybrid"), "model.embed_tokens.weight"
    tensors = load_file(model.folder / "model.safetensors")
    head = tensors[embedding].clone()
    head[-1, -1] += 1
    copy_with(model, tmp_path, lambda t: t | {"lm_head.weight": head})
    with pytest.raises(WeightsError, match="'lm_head.weight' .*\"tie_word_embeddings\": false"):
        load(tmp_path, parallel)
    ours = load(model.folder, parallel)
    with pytest.raises(WeightsError, match="different values"):
        ModelUpdates(ours).update({embedding: head + 1, "lm_head.weight": head})
    assert ours.embedding is not None
    assert torch.equal(ours.embedding.weight, tensors[embedding]), "nothing was changed"


def test_a_tied_head_may_stand_for_the_embedding(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    model, tokens = tiny("granite_moe_hybrid"), random_tokens(20)
    names = {"model.embed_tokens.weight": "lm_head.weight"}
    copy_with(model, tmp_path, lambda t: {names.get(k, k): v for k, v in t.items()})
    ours = load(tmp_path, parallel)
    assert torch.equal(run_in_segments(ours, tokens, []), run_in_segments(model.ours, tokens, []))


@pytest.mark.parametrize(
    ("theta", "size", "fits"), [(1e4, 8, True), (5e5, 8, False), (1e4, 16, False)]
)
def test_rotary_tables_have_to_be_the_configurations(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext, theta: float, size: int, fits: bool
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    table = (theta ** -(torch.arange(size) / size)).to(torch.bfloat16)
    copy_with(tiny("llama"), tmp_path, lambda t: t | {name: table})
    if fits:
        load(tmp_path, parallel)
        return
    with pytest.raises(WeightsError, match="inv_freq' .* other frequencies than rope_theta 10000"):
        load(tmp_path, parallel)


def test_two_spellings_of_one_name_are_refused(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    model, names = tiny("nemotron_h"), ("backbone.norm_f.weight", "model.norm_f.weight")
    copy_with(model, tmp_path, lambda t: t | {name: torch.ones(64) for name in names})
    with pytest.raises(WeightsError, match="are names of the same weight"):
        load(tmp_path, parallel)
    with pytest.raises(WeightsError, match="are names of the same weight"):
        ModelUpdates(model.ours).update([(name, torch.ones(64)) for name in names])


def test_two_sets_of_files_are_refused(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """transformers reads the one, and another program the other."""
    copy_with(tiny("llama"), tmp_path, lambda t: t)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(WeightsError, match="both model.safetensors and .*index.json"):
        load(tmp_path, parallel)


def test_time_constants_stay_in_float32(tiny: Tiny, parallel: ParallelContext) -> None:
    model = load(tiny("nemotron_h").folder, parallel, dtype=torch.bfloat16)
    kept = {n.rsplit(".")[-1] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "D"}
    assert not any(p.requires_grad for p in model.parameters())


def test_dummy_weights_need_only_a_configuration(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    shutil.copy(tiny("nemotron_h_moe").folder / "config.json", tmp_path)
    tokens = random_tokens(20)
    first, again, other = (
        run_in_segments(load(tmp_path, parallel, load_format="dummy", seed=seed), tokens, [7])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.isfinite().all() and first.std() > 0.05
    with pytest.raises(ConfigurationError, match="--load-format is 'gguf'"):
        load(tmp_path, parallel, load_format="gguf")
