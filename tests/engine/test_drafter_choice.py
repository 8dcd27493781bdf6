"""--drafter: which checkpoints have a head, and what is said where it cannot be used."""

from __future__ import annotations

import json
import logging
import shutil
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.engine.build import build_engine, load_weights
from megatron_hybrid.engine.head import drafts_from_head
from megatron_hybrid.engine.prompt_lookup import PromptLookup
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.parallel import initialize
from tests.mtp_models import MTP_FAMILIES, MTPOracle, make_mtp_model
from tests.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 4,
    "num_speculative_tokens": 3,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MTPOracle]:
    folders = {family: tmp_path_factory.mktemp(family) for family in MTP_FAMILIES}
    return {family: make_mtp_model(family, folder) for family, folder in folders.items()}


def changed(oracle: MTPOracle, folder: Path, **values: Any) -> Path:
    """The same checkpoint with other values in its config.json."""
    shutil.copytree(oracle.folder, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **(OPTIONS | options))


def has_head(llm: LLM) -> bool:
    speculation = llm.engine.scheduler.decodes.speculation
    found = speculation is not None and speculation.drafter is None
    assert found == (llm.engine.runner._model.mtp is not None)
    return found


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_heads_are_used_where_there_are_some(oracles: dict[str, MTPOracle], family: str) -> None:
    folder = oracles[family].folder
    assert has_head(llm(folder)) and has_head(llm(folder, drafter="heads"))
    for options in ({"drafter": "prompt_lookup"}, {"num_speculative_tokens": 0}):
        plain = llm(folder, **options)
        assert not has_head(plain)
        assert len(plain.engine.runner._caches.kv) == 1  # it takes no memory either


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "qwen3_5_text. has no head .* describes none"),
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "config.json describes 2 heads; drafts come fr"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "has an embedding of its own"),
        ("nemotron_h", {"num_nextn_predict_layers": 0}, "nemotron_h. has no head"),
        ("nemotron_h", {"mtp_layers_block_type": ["mamba", "moe"]}, "of the layers 'ME'; it must"),
        ("nemotron_h", {"mtp_layers_block_type": ["moe", "attention"]}, "of the layers 'E[*]'"),
    ],
)
def test_heads_that_are_not_supported_are_refused_when_they_are_asked_for(
    oracles: dict[str, MTPOracle],
    tmp_path: Path,
    family: str,
    values: dict[str, Any],
    message: str,
) -> None:
    folder = changed(oracles[family], tmp_path, **values)
    with pytest.raises(ConfigurationError, match=f"--drafter is heads. .*{message}"):
        llm(folder, drafter="heads")
    assert not has_head(llm(folder))


def test_the_pattern_of_a_head_may_be_written_in_letters(
    oracles: dict[str, MTPOracle], tmp_path: Path
) -> None:
    oracle = oracles["nemotron_h"]
    values = {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E"}
    read = ModelFolder.open(changed(oracle, tmp_path, **values)).config
    assert read == ModelFolder.open(oracle.folder).config
    assert read.mtp is not None and read.mtp.pattern == "*E"


def test_a_checkpoint_without_the_weights_of_its_head_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("qwen3_next", tmp_path)
    with caplog.at_level(logging.WARNING):
        found = llm(tmp_path)
    assert not has_head(found)
    assert isinstance(found.engine.scheduler.decodes.speculation.drafter, PromptLookup)
    assert "Drafts come from prompt lookup, not from the model's head. The weights" in caplog.text
    with pytest.raises(ConfigurationError, match=r"heads. The weights of the head .*mtp.* are not"):
        llm(tmp_path, drafter="heads")


def test_a_head_that_lacks_a_weight_is_refused(
    oracles: dict[str, MTPOracle], tmp_path: Path
) -> None:
    folder = changed(oracles["qwen3_5"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"'mtp.layers.0.mlp.up_proj.weight' is missing"):
        llm(folder)
    assert not has_head(llm(folder, drafter="prompt_lookup"))


def test_models_of_families_without_heads_are_told_so(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    assert not has_head(llm(tmp_path))
    with pytest.raises(ConfigurationError, match=r"llama. has no head for multi-token prediction"):
        llm(tmp_path, drafter="heads")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pipeline", "--pipeline-model-parallel-size is 2; with a head .* only be 1"),
        ("replicas", "2 replicas share the model's experts .--expert-model-parallel-size"),
    ],
)
def test_ranks_that_have_no_drafts_from_heads(
    oracles: dict[str, MTPOracle], place: str, message: str
) -> None:
    parallel, folder = initialize(), oracles["qwen3_next"].folder
    two = copy(parallel.pipeline if place == "pipeline" else parallel.experts.replicas)
    two.size = 2
    if place == "pipeline":
        parallel = replace(parallel, pipeline=two)
    else:
        parallel = replace(parallel, experts=replace(parallel.experts, replicas=two))
    config = EngineConfig(load=str(folder), **OPTIONS)
    described = ModelFolder.open(folder)
    assert not drafts_from_head(config, described, parallel)
    with pytest.raises(ConfigurationError, match=message):
        drafts_from_head(config.replace(drafter="heads"), described, parallel)


def test_engines_on_shared_weights_may_do_without_the_head(oracles: dict[str, MTPOracle]) -> None:
    config = EngineConfig(load=str(oracles["qwen3_5"].folder), **OPTIONS)
    model = load_weights(config)
    assert build_engine(config, model=model).scheduler.decodes.speculation.drafter is None
    for other in (
        config.replace(num_speculative_tokens=0),
        config.replace(drafter="prompt_lookup"),
    ):
        own = build_engine(other, model=model)
        own.add_request("a", PROMPT, GREEDY)
        assert own.runner._model.mtp is None and len(own.runner._caches.kv) == 1
        while own.has_work():
            own.step()
        assert model.mtp is not None and len(model.kv_specs) == 2
        plain = load_weights(other)
        assert build_engine(config, model=plain).scheduler.decodes.speculation.drafter is not None
        with pytest.raises(ConfigurationError, match="was loaded without its head"):
            build_engine(config.replace(drafter="heads"), model=plain)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_dummy_weights_have_a_head(
    oracles: dict[str, MTPOracle], tmp_path: Path, family: str
) -> None:
    shutil.copy(oracles[family].folder / "config.json", tmp_path)
    found = llm(tmp_path, load_format="dummy")
    assert has_head(found)
    (output,) = found.generate([PROMPT], GREEDY, progress=False)
    assert len(output.token_ids) == 40 and found.stats()["draft_tokens"] > 0


def test_new_weights_reach_the_head(oracles: dict[str, MTPOracle], tmp_path: Path) -> None:
    """Drafts that hold are the oracle's, which tells the one head from the other."""
    old = make_mtp_model("qwen3_5", tmp_path / "old", agrees=True)
    new = make_mtp_model("qwen3_5", tmp_path / "new", agrees=True, seed=5)

    def counts(engine: LLM) -> tuple[list[int], int, int]:
        engine.engine.reset()
        before = engine.stats()
        (output,) = engine.generate([PROMPT], GREEDY, progress=False)
        after = engine.stats()
        made = [after[name] - before[name] for name in ("draft_tokens", "accepted_tokens")]
        return output.token_ids, made[0], made[1]

    engine, right = llm(old.folder), counts(llm(new.folder))
    first = counts(engine)
    for source in (new.folder, load_file(new.folder / "model.safetensors")):
        engine.update_weights(load_file(old.folder / "model.safetensors"))
        assert counts(engine) == first
        engine.update_weights(source)
        assert counts(engine) == right
    # the head alone, and all but the head
    engine.update_weights(old.checkpoint())
    mixed = counts(engine)
    assert mixed[0] == right[0] and mixed[1:] != right[1:]
    rest = load_file(old.folder / "model.safetensors")
    engine.update_weights({k: v for k, v in rest.items() if not k.startswith("mtp.")})
    assert counts(engine) == first
    with pytest.raises(WeightsError, match=r"'mtp.fc.weight' has shape"):
        engine.update_weights({"mtp.fc.weight": torch.zeros(2, 2)})
