"""The text part of models that also see or hear: transformers' whole models, asked with text, are
the oracle; what else is in their folders is neither read nor complained about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.thorough import A_THIRD
from tests.tiny_models import draw, make_tiny_model

Tiny = Callable[[str], TinyModel]
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEAD = ENCODER | {"audio_hidden_size": 32}
QWEN_VISION: dict[str, Any] = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
}
MINICPM_VISION: dict[str, Any] = {"vision_config": ENCODER, "insert_layer_id": 1}
SPEECH: dict[str, Any] = {
    "encoder_config": {
        "hidden_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "input_dim": 16,
        "output_dim": 10,
    },
    "projector_config": ENCODER | {"encoder_hidden_size": 32},
}
# model_type of the whole -> transformers' class, the tiny model that its text part is, the rest
WHOLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN_VISION),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN_VISION),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", "qwen4_exp", QWEN_VISION),
    "minicpmv4_6": ("MiniCPMV4_6ForConditionalGeneration", "qwen3_5", MINICPM_VISION),
    "minicpmv4_7": ("MiniCPMV4_7ForConditionalGeneration", "qwen3_5", MINICPM_VISION),
    "minicpm_ocr": ("MiniCPMOcrForConditionalGeneration", "qwen3_5", MINICPM_VISION),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "projection_intermediate_size": 48,
                "patch_size": 4,
                "image_size": 16,
            },
        },
    ),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", "lfm2", {"vision_config": ENCODER}),
    "nemotron_h_omni": (
        "NemotronH_Omni_Reasoning_V3",
        "nemotron_h",
        {
            "vision_config": ENCODER
            | {"patch_size": 4, "image_size": 16, "video_temporal_patch_size": 2},
            "vision_hidden_size": 32,
            "projector_hidden_size": 32,
            "audio_config": ENCODER | {"projection_hidden_size": 32, "projection_bias": False},
        },
    ),
    "nemo_speechlm": (
        "Nemotron3_5TranscribeForConditionalGeneration",
        "nemotron_h_moe",
        {
            "audio_config": {
                "asr_config": ENCODER,
                "diarization_config": {"audio_config": ENCODER, "head_config": HEAD},
            },
            "word_timestamp_config": ENCODER | {"vocab_size": 11, "blank_token_id": 10},
        },
    ),
    "granite_speech": ("GraniteSpeechForConditionalGeneration", "granite_moe_hybrid", SPEECH),
    "granite_speech_plus": (
        "GraniteSpeechPlusForConditionalGeneration",
        "granite_moe_hybrid",
        SPEECH,
    ),
    "inkling_mm_model": (
        "InklingForConditionalGeneration",
        "inkling",
        {
            "vision_config": {"hidden_size": 64, "num_hidden_layers": 4, "patch_size": 2},
            "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        },
    ),
    "inkling2": (
        "Inkling2ForConditionalGeneration",
        "inkling2",
        {
            "vision_config": {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 2,
                "projection_hidden_dim": 32,
                "text_hidden_size": 64,
            },
        },
    ),
}
# Of types that transformers does not know: which of those above has the same weights.
LIKE = {
    "NemotronH_Nano_VL_V2": "nemotron_h_omni",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni",
    "intern_s2_preview": "qwen3_5_moe",
    "nemotron3_5_transcribe": "nemo_speechlm",
}


def make_whole(kind: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """A random model of transformers in `folder`; `overrides`: of its text part."""
    name, family, others = WHOLES[kind]
    (folder / "text").mkdir(parents=True)
    if "granite" in kind:  # transformers 5.24 forgets it there
        overrides["logits_scaling"] = 1.0
    text = make_tiny_model(family, folder / "text", **overrides).config.to_dict()
    config = AutoConfig.for_model(kind, text_config=text, **others)
    model: PreTrainedModel = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "language_model" in parameter_name or parameter_name.startswith("lm_head"):
                drawn = draw(parameter_name, parameter, generator)
                tied = "embed" in parameter_name and getattr(config, "tie_word_embeddings", False)
                parameter.copy_(drawn * 0.1 if tied else drawn)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check_text(model: PreTrainedModel, folder: Path, parallel: ParallelContext) -> None:
    tokens = random_tokens(45)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    found = run_in_segments(load(folder, parallel), tokens, [20, 3, 1])
    scale = float(expected.abs().max())
    assert expected.std() > 0.03 * scale
    torch.testing.assert_close(found, expected, atol=2e-5 * scale, rtol=2e-5)


@A_THIRD
@pytest.mark.parametrize("kind", WHOLES)
def test_texts_have_the_whole_models_logits(
    tmp_path: Path, parallel: ParallelContext, kind: str
) -> None:
    model = make_whole(kind, tmp_path)
    check_text(model, tmp_path, parallel)
    assert ModelFolder.open(tmp_path).config.model_type == kind


@pytest.mark.parametrize("kind", ["lfm2_vl", "nemotron_h_omni", "minicpmv4_6"])
def test_a_fork_of_other_sizes_loads(tmp_path: Path, parallel: ParallelContext, kind: str) -> None:
    model = make_whole(kind, tmp_path, hidden_size=96, vocab_size=170, num_key_value_heads=4)
    check_text(model, tmp_path, parallel)
    config = ModelFolder.open(tmp_path).config
    assert (config.hidden_size, config.vocab_size) == (96, 170)


@pytest.mark.parametrize("kind", LIKE)
def test_types_that_transformers_does_not_know(
    tmp_path: Path, parallel: ParallelContext, kind: str
) -> None:
    """The text part of NVIDIA's is llm_config."""
    model = make_whole(LIKE[kind], tmp_path)

    def change(values: dict[str, Any]) -> None:
        values["model_type"] = kind
        if kind.startswith("NemotronH"):
            values["llm_config"] = values.pop("text_config")

    change_config(tmp_path, change)
    check_text(model, tmp_path, parallel)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model."])
def test_names_of_older_versions_and_of_the_text_alone(
    tmp_path: Path, parallel: ParallelContext, prefix: str
) -> None:
    model = make_whole("qwen3_5", tmp_path)
    head = "lm_head." if prefix == "model." else "language_model.lm_head."

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ((name, name.replace("model.language_model.", prefix)) for name in tensors)
        return {new.replace("lm_head.", head): tensors[old] for old, new in names}

    change_weights(tmp_path, rename)
    check_text(model, tmp_path, parallel)


def test_experts_as_nemo_stacks_them(tmp_path: Path, parallel: ParallelContext) -> None:
    """[experts, inputs, outputs]; transformers reads them so."""
    model = make_whole("nemo_speechlm", tmp_path, moe_intermediate_size=40)

    def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {name: t for name, t in tensors.items() if ".mixer.experts." not in name}
        for layer in (1, 4):
            experts = f"llm.model.layers.{layer}.mixer.experts"
            for name, theirs in (("up_proj", "gate_and_up_projs"), ("down_proj", "down_projs")):
                every = [tensors[f"{experts}.{i}.{name}.weight"].t() for i in range(8)]
                others[f"{experts}.{theirs}"] = torch.stack(every)
        return others | {"llm.model.layers.0.mixer.in_proj._extra_state": torch.zeros(3)}

    change_weights(tmp_path, stack)
    check_text(model, tmp_path, parallel)
    tokens = torch.tensor([random_tokens(9)])
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path)(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(again, model(input_ids=tokens, use_cache=False).logits)


def test_encoders_may_have_any_tensors(tmp_path: Path, parallel: ParallelContext) -> None:
    """Also such as the text part would be asked about: rotary tables, scales, a head."""
    model = make_whole("lfm2_vl", tmp_path)
    strange = (
        "model.vision_tower.rotary_emb.inv_freq",
        "model.vision_tower.layers.0.self_attn.k_scale",
        "model.time_series.lm_head.weight",
        "vision_tower.model.layers.0.weight",
    )
    change_weights(tmp_path, lambda t: t | {name: torch.full((3,), 7.0) for name in strange})
    check_text(model, tmp_path, parallel)


def test_a_strange_tensor_of_the_text_is_refused(tmp_path: Path, parallel: ParallelContext) -> None:
    make_whole("lfm2_vl", tmp_path)
    name = "model.language_model.layers.0.surprise.weight"
    change_weights(tmp_path, lambda t: t | {name: torch.ones(2)})
    with pytest.raises(WeightsError, match=f"'{name}' .* has no place in a lfm2_vl model"):
        load(tmp_path, parallel)


def test_the_whole_says_whether_the_head_is_the_embedding(
    tmp_path: Path, parallel: ParallelContext
) -> None:
    """Its text part may say otherwise, as transformers' default does for LFM2's."""
    model = make_whole("lfm2_vl", tmp_path)
    change_config(tmp_path, lambda values: values.pop("tie_word_embeddings"))
    change_config(tmp_path, lambda values: values["text_config"].update(tie_word_embeddings=False))
    check_text(model, tmp_path, parallel)  # the default of lfm2_vl
    (tmp_path / "untied").mkdir()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(tmp_path / "untied")
    change_config(
        tmp_path / "untied", lambda values: values["text_config"].update(tie_word_embeddings=True)
    )
    check_text(model, tmp_path / "untied", parallel)


def test_what_the_text_part_leaves_open_the_whole_says(tiny: Tiny, tmp_path: Path) -> None:
    text = json.loads((tiny("lfm2").folder / "config.json").read_text())
    whole = {"text_config": text | {"eos_token_id": None}, "eos_token_id": 7, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2_vl"} | whole))
    config = ModelFolder.open(tmp_path).config
    assert config.eos_token_ids == (7,) and config.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("granite_speech", {"model_type": "granite"}, "of type 'granite'; in a model of type 'gr"),
        ("lfm2_vl", {"model_type": "lfm3"}, "'lfm2_vl' only lfm2 or lfm2_moe is supported"),
        ("nemotron_h_omni", {"sliding_window": 64}, "sliding_window = 64"),
        ("qwen3_5", {"vocab_size": None}, "has no 'vocab_size'"),
    ],
)
def test_text_parts_that_are_refused(
    tiny: Tiny, tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    text = json.loads((tiny(WHOLES[kind][1]).folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    with pytest.raises(ConfigurationError, match=message):
        _ = ModelFolder.open(tmp_path).config


def test_a_text_part_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl", "text_config": "lfm2"}')
    with pytest.raises(ConfigurationError, match=r"text_config in .* is no object"):
        _ = ModelFolder.open(tmp_path).config


@pytest.mark.parametrize(
    "name",
    [
        "Lfm2BidirectionalModel",
        "Lfm2BidirectionalForMaskedLM",
        "Lfm2Model",
        "Lfm2ForSequenceClassification",
        "JevForDecision",
    ],
)
def test_models_for_something_else_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    """LFM2's encoders and retrievers have its model_type."""
    values = json.loads((tiny("lfm2").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [name]}))
    with pytest.raises(ConfigurationError, match=f"is a {name}'s, which does not predict"):
        _ = ModelFolder.open(tmp_path).config
    usual = ["Lfm2ForCausalLM", "GPT2LMHeadModel", "Lfm2VlForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": usual}))
    assert ModelFolder.open(tmp_path).config.model_type == "lfm2"
