"""Inkling 2's weights by the names of releases, which transformers saves them by, and by its own;
rows of no token; tensors in which rows take turns. transformers' model is the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.inkling2.configuration_inkling2 import Inkling2Config, Inkling2TextConfig

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.layers.attention_residuals import AttentionResidualsConfig
from megatron_hybrid.layers.sink_attention import SinkAttentionConfig
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.models.test_inkling import change_weights, weights_of
from tests.models.test_logits import close
from tests.models.test_text_parts import make_whole


def test_what_a_config_does_not_say_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Of a text part alone and inside of the whole; older names of the same."""
    Inkling2TextConfig(dtype="bfloat16").save_pretrained(tmp_path)
    theirs = ModelFolder.open(tmp_path).config
    assert theirs.pattern == "LELELELELE*E" * 8
    assert (theirs.vocab_size, theirs.padded_vocab_size) == (200_058, 201_024)
    short = {"model_type": "inkling2_text", "hidden_size": 4608, "dtype": "bfloat16"}
    others = {
        "sconv_kernel_size": 4, "model_max_length": 1048576, "intermediate_size": 2304,
        "num_local_experts": 384, "routed_scaling_factor": 8.0, "sliding_window": 1024,
    }  # fmt: skip
    for said in (short, short | others):
        text = said | {"vocab_size": 201_024, "eos_token_id": 200_006}
        (tmp_path / "config.json").write_text(json.dumps(text))
        assert ModelFolder.open(tmp_path).config == theirs
    Inkling2Config(text_config=short).save_pretrained(tmp_path)
    whole = ModelFolder.open(tmp_path).config
    assert whole.model_type == "inkling2" and whole.streams == theirs.streams
    assert (whole.attention, whole.others) == (theirs.attention, theirs.others)
    assert isinstance(theirs.streams, AttentionResidualsConfig) and theirs.streams.count == 9
    assert isinstance(theirs.attention, SinkAttentionConfig)
    assert theirs.moe is not None and theirs.moe.expert.activation == "silu_capped_4.0_25.0"


def test_weights_are_found_by_transformers_own_names(
    tmp_path: Path, parallel: ParallelContext
) -> None:
    model = TinyModel("inkling2", tmp_path / "saved", parallel)
    own = {name: tensor.clone() for name, tensor in model.theirs.state_dict().items()}
    assert not set(own) & set(load_file(tmp_path / "saved/model.safetensors"))
    there = change_weights(tmp_path / "saved", tmp_path / "own", lambda _: own)
    tokens = random_tokens(40)
    expected = model.expected(tokens)
    close(run_in_segments(model.ours, tokens, [20, 1]), expected)
    close(run_in_segments(load(there, parallel), tokens, [20, 1]), expected)


def test_rows_of_no_token_may_be_there_or_not(tmp_path: Path, parallel: ParallelContext) -> None:
    """transformers fills the head up with zeros."""
    model = TinyModel("inkling2", tmp_path / "padded", parallel, unpadded_vocab_size=147)
    saved = load_file(tmp_path / "padded/model.safetensors")
    assert len(saved["model.llm.unembed.weight"]) == 160
    tokens = [token % 147 for token in random_tokens(40)]
    expected = model.expected(tokens)
    assert expected.shape[1] == 147
    close(run_in_segments(model.ours, tokens, [20, 1]), expected)

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ends = "unembed.weight", "embed.weight"
        return {
            name: tensor[:147].clone() if name.endswith(ends) else tensor
            for name, tensor in tensors.items()
        }

    short = change_weights(tmp_path / "padded", tmp_path / "short", cut)
    close(run_in_segments(load(short, parallel), tokens, [20, 1]), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_rows_whatever_names_they_have(
    tmp_path: Path, parallel: ParallelContext, rank: int
) -> None:
    """The same of a whole model as it is released, and of its text part by transformers' names."""
    model = make_whole("inkling2", tmp_path / "whole", num_key_value_heads=1)
    text = {
        name.replace("model.language_model.", "model."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if "language_model" in name or name.startswith("lm_head")
    }
    there = change_weights(tmp_path / "whole/text", tmp_path / "text", lambda _: text)
    both = [weights_of(folder, parallel, rank) for folder in (tmp_path / "whole", there)]
    assert both[0].keys() == both[1].keys()
    for name, tensor in both[0].items():
        assert torch.equal(tensor, both[1][name]), name


def test_a_weight_that_has_no_place_is_refused(tmp_path: Path, parallel: ParallelContext) -> None:
    TinyModel("inkling2", tmp_path / "saved", parallel)
    strange = {"model.llm.layers.0.attn.wz.weight": torch.ones(3)}
    there = change_weights(tmp_path / "saved", tmp_path / "strange", lambda known: known | strange)
    with pytest.raises(WeightsError, match="'model.llm.layers.0.attn.wz.weight' .* has no place"):
        load(there, parallel)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "mxfp8"}, "quantised with 'mxfp8', which is not read"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0' is not supported"),
    ],
)
def test_mxfp8_is_refused(tmp_path: Path, said: dict[str, object], message: str) -> None:
    """The first release is stored in it."""
    Inkling2TextConfig().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": said}))
    with pytest.raises(ConfigurationError, match=message):
        _ = ModelFolder.open(tmp_path).quantization
