"""Hugging Face folders become Megatron checkpoints and come back; what is wrong in one is named."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from convert.conversion import to_hugging_face, to_megatron
from convert.writer import Piece, StoredTensor, write_checkpoint
from megatron_hybrid import LLM, ConfigurationError, SamplingParams, WeightsError, reference_model
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import load
from tests.models.driver import run_in_segments
from tests.thorough import A_THIRD
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
TOKENS = [(5 * i * i + i) % 160 for i in range(20)]
EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "nemotron_h": {},
    "nemotron_h_moe": {"num_experts_per_tok": 4},
    "bamba": {"vocab_size": 163},
    "mamba2": {"tie_word_embeddings": True},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmo_hybrid", {}, "norms behind its layers"),
    ("minimax", {}, "lightning attention"),
    ("qwen4_exp", {}, "several residual streams"),
    ("falcon_h1", {}, "side by side"),
    ("zamba2", {}, "layers share"),
    ("mamba", {}, "Mamba1"),
    ("jamba", {}, "Mamba1"),
    ("lfm2", {}, "short convolutions"),
    ("inkling", {}, "short convolutions behind its layers"),
    ("inkling2", {}, "short convolutions behind its layers"),
    ("lfm3", {"layer_types": ["sliding_attention"] * 5}, "letter for attention with a sliding"),
    (
        "lfm3",
        {"layer_types": ["full_attention"] * 5, "use_sandwich_norm": False},
        "gate for each head",
    ),
    ("zaya", {}, "attention over convolved queries"),
    ("granite_moe_hybrid", {}, "embedding multiplier|scale of attention"),
    ("nemotron_h_moe", {}, "3 experts a token in 2 groups"),
    ("nemotron_h", {"use_bias": True}, "bias in Mamba's projections"),
    ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "epsilon of the norm in Mamba"),
]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def rewrite(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The checkpoint once more, with other tensors."""
    checkpoint = MegatronCheckpoint(folder / "release")
    tensors = {
        name: checkpoint.read(name, tuple(slice(0, n) for n in shape))
        for name, shape in checkpoint.shapes.items()
    }
    change(tensors)
    stored = [
        StoredTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            [Piece((0,) * tensor.ndim, tuple(tensor.shape), lambda tensor=tensor: tensor)],
        )
        for name, tensor in tensors.items()
    ]
    write_checkpoint(target, stored, dict(checkpoint.arguments or {}), progress=False)
    for path in folder.glob("*.json"):
        shutil.copyfile(path, target / path.name)
    return target


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder, and the Megatron checkpoint that it was converted to."""
    root = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", root / "hf")
    to_megatron(root / "hf", root / "megatron", progress=False)
    return root / "hf", root / "megatron"


def test_a_weight_without_a_place_is_not_left_out(llama: tuple[Path, Path], tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(llama[0], source)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors_of(source) | {name: torch.ones(64)}, source / "model.safetensors")
    with pytest.raises(WeightsError, match=f"'{name}' .* has no place"):
        to_megatron(source, tmp_path / "megatron", progress=False)


def test_a_tied_head_has_to_be_the_embedding(tmp_path: Path, parallel: ParallelContext) -> None:
    source, megatron, same, other = (tmp_path / name for name in ("hf", "mt", "same", "other"))
    make_tiny_model("mamba2", source, tie_word_embeddings=True)
    to_megatron(source, megatron, progress=False)
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    rewrite(megatron, same, lambda t: t.update({head: t[embedding].clone()}))
    load(same, parallel)
    to_hugging_face(same, tmp_path / "back", progress=False)
    assert_same_tensors(source, tmp_path / "back")
    rewrite(megatron, other, lambda t: t.update({head: t[embedding] + 1}))
    for convert in (lambda: load(other, parallel), lambda: to_hugging_face(other, tmp_path / "no")):
        with pytest.raises(WeightsError, match=f"'{head}' .* different values"):
            convert()
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"] + 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match="'lm_head.weight' .* different values"):
        to_megatron(source, tmp_path / "not_either", progress=False)


# ------------------------------------------------------------------ there and back


@A_THIRD
@pytest.mark.parametrize("family", EXPRESSIBLE)
def test_there_and_back_is_the_same_bit_for_bit(family: str, tmp_path: Path) -> None:
    source, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    make_tiny_model(family, source, **EXPRESSIBLE[family])
    to_megatron(source, megatron, progress=False)
    to_hugging_face(megatron, back, progress=False)
    assert_same_tensors(source, back)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_norms_around_one_are_kept_to_the_last_bit_where_megatron_has_them_around_zero(
    tmp_path: Path,
) -> None:
    """The gated delta net's norm: weight - 1 has more digits than the weight."""
    make_tiny_model("qwen3_next", tmp_path / "fp32")
    names = tensors_of(tmp_path / "fp32")
    for dtype, wider in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        source, megatron = tmp_path / f"hf-{dtype}", tmp_path / f"megatron-{dtype}"
        shutil.copytree(tmp_path / "fp32", source)
        halves = {name: tensor.to(dtype) for name, tensor in names.items()}
        save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
        to_megatron(source, megatron, progress=False)
        checkpoint = MegatronCheckpoint(megatron / "release")
        norm = "decoder.layers.0.self_attention.out_norm.weight"
        assert checkpoint.dtypes[norm] == wider
        stored = checkpoint.read(norm, (slice(0, 16),))
        assert torch.equal(
            stored.double() + 1, halves["model.layers.0.linear_attn.norm.weight"].double()
        )
        to_hugging_face(megatron, tmp_path / f"back-{dtype}", progress=False)
        assert_same_tensors(source, tmp_path / f"back-{dtype}")


def test_a_model_is_written_in_as_many_files_as_it_takes(
    llama: tuple[Path, Path], tmp_path: Path, parallel: ParallelContext
) -> None:
    source, megatron = llama
    to_hugging_face(megatron, tmp_path / "hf", max_shard_bytes=60_000, progress=False)
    files = sorted(tmp_path.glob("hf/*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 70_000 for file in files)
    assert_same_tensors(source, tmp_path / "hf")
    assert torch.equal(logits(tmp_path / "hf", parallel), logits(source, parallel))


@pytest.mark.parametrize(("family", "overrides", "words"), REFUSED)
def test_what_megatron_cannot_express_is_refused_by_name(
    family: str, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path / "hf", **overrides)
    with pytest.raises(ConfigurationError, match=f"Megatron has no.*({words})"):
        to_megatron(tmp_path / "hf", tmp_path / "megatron", progress=False)
    assert not (tmp_path / "megatron").exists()


def test_a_folder_with_something_in_it_is_not_written_to(llama: tuple[Path, Path]) -> None:
    source, megatron = llama
    with pytest.raises(ConfigurationError, match="exists already"):
        to_megatron(source, megatron, progress=False)


def test_the_tool_converts_both_ways_and_says_what_is_wrong(
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*flags: object) -> int:
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", "--quiet", *map(str, flags)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")
        return int(ended.value.code or 0)

    source, _ = llama
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert run("--from", source, "--to", megatron, "--format", "torch_dist") == 0
    assert run("--from", megatron, "--to", back, "--format", "hf") == 0
    assert_same_tensors(source, back)
    assert run("--from", megatron, "--to", back, "--format", "hf") == 2
    assert "exists already" in capsys.readouterr().err


# ------------------------------------------------------------------ serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model as a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("served") / "reference"
    to_megatron(reference_model.path(), folder, progress=False)
    return folder


def answer(**options: Any) -> str:
    llm = LLM(device="cpu", inference_dynamic_batching_buffer_size_gb=0.02, **options)
    prompt = [{"role": "user", "content": "My name is Anna. What is my name?"}]
    output = llm.chat(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    return str(output[0].text if isinstance(output, list) else output.text)


def test_a_checkpoint_with_its_tokenizer_beside_it_is_served_like_the_folder_it_is_from(
    served: Path,
) -> None:
    expected = answer(load=str(reference_model.path()))
    assert "Anna" in expected
    assert answer(load=str(served)) == expected
    assert answer(load=str(served / "release")) == expected  # one iteration's folder


def test_a_checkpoint_of_megatrons_own_needs_only_a_tokenizer(served: Path, tmp_path: Path) -> None:
    """What the model is, its arguments say; what ends an answer, the tokenizer's folder."""
    shutil.copytree(served / "release", tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    expected = answer(load=str(reference_model.path()))
    found = answer(load=str(tmp_path), tokenizer_model=str(reference_model.path()))
    assert found == expected


def test_new_weights_come_from_a_checkpoint(
    llama: tuple[Path, Path], tmp_path: Path, parallel: ParallelContext
) -> None:
    make_tiny_model("llama", tmp_path / "other", seed=5)
    model = load(tmp_path / "other", parallel)
    source, megatron = llama
    ModelUpdates(model).update(megatron)
    assert torch.equal(run_in_segments(model, TOKENS, []), logits(source, parallel))
    make_tiny_model("llama", tmp_path / "larger", num_hidden_layers=4)
    to_megatron(tmp_path / "larger", tmp_path / "larger-megatron", progress=False)
    with pytest.raises(WeightsError, match="pattern|no place|rows|begin with"):
        ModelUpdates(model).update(tmp_path / "larger-megatron")
    assert torch.equal(run_in_segments(model, TOKENS, []), logits(source, parallel))


# ------------------------------------------------------------------ the format


def logits(folder: Path, parallel: ParallelContext) -> Tensor:
    return run_in_segments(load(folder, parallel), TOKENS, [])


def test_any_rectangle_is_put_together_from_what_is_stored(tmp_path: Path) -> None:
    values = torch.arange(7 * 10 * 6.0).view(7, 10, 6)
    pieces = []
    for i in range(0, 7, 2):
        for j, rows in ((0, 3), (3, 7)):  # not all of one size
            part = values[i : i + 2, j : j + rows]
            pieces.append(Piece((i, j, 0), tuple(part.shape), lambda part=part: part))
    write_checkpoint(
        tmp_path / "ckpt", [StoredTensor("w", (7, 10, 6), values.dtype, pieces)], {}, progress=False
    )
    checkpoint = MegatronCheckpoint(tmp_path / "ckpt" / "release")
    for index in (
        (slice(0, 7), slice(0, 10), slice(0, 6)),
        (slice(1, 6), slice(2, 9), slice(3, 5)),
        (4, slice(1, 4), slice(0, 6)),
        (6, slice(9, 10), slice(5, 6)),
    ):
        assert torch.equal(checkpoint.read("w", index), values[index])


def test_padding_stacked_layers_and_optimizer_states_change_nothing(
    llama: tuple[Path, Path], tmp_path: Path, parallel: ParallelContext
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            padding = torch.full((32, 64), float("nan"))
            tensors[name] = torch.cat((tensors[name], padding))
        layers = [name for name in tensors if name.startswith("decoder.layers.0.")]
        for name in layers:
            parts = [tensors.pop(name.replace(".0.", f".{i}.", 1)) for i in range(3)]
            tensors[name.replace(".0.", ".", 1)] = torch.stack(parts)
            tensors[f"optimizer.state.exp_avg.{name}"] = torch.zeros(3)
        tensors["chained_0.optimizer.state.fp32_param.x"] = torch.zeros(3)

    source, megatron = llama
    changed = rewrite(megatron, tmp_path / "megatron", change)
    assert torch.equal(logits(changed, parallel), logits(source, parallel))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("decoder.layers.1.mlp.linear_fc2.weight"), "linear_fc2.weight.*missing"),
        (
            lambda t: t.update({"decoder.layers.9.x": torch.zeros(2)}),
            "decoder.layers.9.x.*no place",
        ),
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(190, 64)}),
            "linear_fc1.weight.*has 190 rows; the configuration makes it 192",
        ),
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(64, 90)}),
            r"linear_fc2.weight.*shape \[64, 90\]; the configuration makes it \[64, 96\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None],
    words: str,
    llama: tuple[Path, Path],
    tmp_path: Path,
    parallel: ParallelContext,
) -> None:
    changed = rewrite(llama[1], tmp_path / "megatron", change)
    with pytest.raises(WeightsError, match=words):
        load(changed, parallel)


def test_a_file_that_is_cut_off_is_named_and_so_is_the_weight(
    llama: tuple[Path, Path], tmp_path: Path, parallel: ParallelContext
) -> None:
    shutil.copytree(llama[1], tmp_path / "megatron")
    (file,) = (tmp_path / "megatron" / "release").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(WeightsError, match="Weight .* cannot be read from"):
        load(tmp_path / "megatron", parallel)


def test_arguments_are_found_where_newer_versions_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core 0.19 has no common.pt: what was in it is an object beside the tensors."""
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "evil"))
    common = [{"args": Namespace(hidden_size=64, a_class=Evil()), "iteration": 3}]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"common_state/shard_0_1": common, "w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    checkpoint = MegatronCheckpoint(tmp_path)
    assert (checkpoint.arguments or {})["hidden_size"] == 64
    assert checkpoint.common["iteration"] == 3 and list(checkpoint.shapes) == ["w"]
    assert not (tmp_path / "evil").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


def test_nothing_in_a_checkpoint_is_run(
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pickles may call anything; those of a checkpoint are read without that."""
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "evil"))
    shutil.copytree(llama[1], tmp_path / "megatron")
    release = tmp_path / "megatron" / "release"
    arguments = MegatronCheckpoint(release).arguments or {}
    torch.save({"args": Namespace(**arguments, a_class=Evil())}, release / "common.pt")
    assert (MegatronCheckpoint(release).arguments or {})["hidden_size"] == 64
    (release / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(WeightsError, match="does not describe a checkpoint"):
        MegatronCheckpoint(release)
    assert not (tmp_path / "evil").exists()
    pickle.loads(pickle.dumps(Evil()))  # would have
    assert (tmp_path / "evil").exists()


def test_folders_that_are_not_what_they_should_be(
    llama: tuple[Path, Path], tmp_path: Path, parallel: ParallelContext
) -> None:
    assert [ModelFolder.open(folder).is_megatron for folder in llama] == [False, True]
    shutil.copytree(llama[1], tmp_path / "megatron")
    release = tmp_path / "megatron" / "release"
    tracker = tmp_path / "megatron" / "latest_checkpointed_iteration.txt"
    tracker.write_text("300\n")
    with pytest.raises(ConfigurationError, match="names iter_0000300, which is not in"):
        load(tmp_path / "megatron", parallel)
    tracker.write_text("soon")
    with pytest.raises(ConfigurationError, match="'soon', which is no iteration"):
        load(tmp_path / "megatron", parallel)
    (release / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(WeightsError, match="'zarr'; only torch_dist"):
        MegatronCheckpoint(release)


def test_a_checkpoint_that_does_not_say_what_it_is_asks_for_a_config(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(llama[1] / "release", tmp_path / "release")
    torch.save({"iteration": 3}, tmp_path / "release" / "common.pt")
    with pytest.raises(ConfigurationError, match="holds no arguments.*config.json"):
        _ = ModelFolder.open(tmp_path / "release").config


EXPERTS = {"num_experts": 8, "moe_layer_freq": 1, "moe_ffn_hidden_size": 32, "moe_router_topk": 4}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_are_weighed_as_megatrons_arguments_say(
    score: str, llama: tuple[Path, Path]
) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from megatron_hybrid.kernels.kernel_set import REFERENCE
    from megatron_hybrid.layers.moe import TopKRouter
    from megatron_hybrid.models.checkpoints.megatron_arguments import MegatronArguments

    arguments = dict(MegatronCheckpoint(llama[1] / "release").arguments or {}) | EXPERTS
    arguments |= {"moe_router_score_function": score, "moe_router_topk_scaling_factor": 2.5}
    arguments["moe_router_num_groups"] = 4  # without --moe-router-group-topk it means nothing
    moe = MegatronArguments(arguments, "here").config().moe
    assert moe is not None
    router = TopKRouter(moe, 64, torch.float32)
    router.weight.data = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    experts, weights = router(x, SimpleNamespace(kernels=REFERENCE))
    found = torch.zeros(5, 8).scatter_(1, experts.long(), weights)
    expected, _ = topk_routing_with_score_function(
        x @ router.weight.t(), 4, num_groups=4, scaling_factor=2.5, score_function=score
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalization": "LayerNorm"}, "--normalization is 'LayerNorm'"),
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"swiglu": False}, "neither --swiglu nor --squared-relu"),
        ({"hybrid_layer_pattern": "M*D-"}, "kind 'D'"),
        ({"hidden_size": None}, "no 'hidden_size'; put a config.json"),
        ({"qk_l2_norm": True}, "--qk-l2-norm"),
        ({"no_rope_freq": 4}, "--no-rope-freq is 4"),
        ({"softmax_type": "off-by-one"}, "--softmax-type is 'off-by-one'"),
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset"),
        ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value"),
        ({**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 2}, "--moe-router-group"),
    ],
)
def test_arguments_of_models_that_we_have_not_are_refused_by_their_flags(
    changes: dict[str, Any], words: str, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(llama[1] / "release", tmp_path / "release")
    arguments = dict(MegatronCheckpoint(llama[1] / "release").arguments or {}) | changes
    torch.save({"args": Namespace(**arguments)}, tmp_path / "release" / "common.pt")
    with pytest.raises(ConfigurationError, match=words):
        _ = ModelFolder.open(tmp_path / "release").config
