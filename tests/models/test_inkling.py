"""Inkling's configuration and weights as they are released: other names, sizes under others, and
tensors in which rows take turns. transformers' model is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.inkling.configuration_inkling import InklingConfig

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.placing import place_parts, put_all
from megatron_hybrid.models.checkpoints.weight_source import open_folder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.models.test_logits import close
from tests.models.test_text_parts import check_text, make_whole
from tests.parallel.pretend import first_of

Tiny = Callable[[str], TinyModel]

# What the released ones say of a text part, of other sizes.
RELEASED: dict[str, Any] = {
    "model_max_length": 1048576,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 160,
    "unpadded_vocab_size": 147,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_rel": 4,
    "rel_extent": 16,
    "q_bias": False,
    "o_bias": False,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "rms_norm_eps": 1e-06,
    "use_embed_norm": True,
    "local_layer_ids": [0, 1, 2, 3, 4, 6],
    "dense_mlp_idx": 2,
    "use_sconv": True,
    "sconv_kernel_size": 3,
    "logits_mup_width_multiplier": 16.0,
    "final_logit_softcapping": None,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "sliding_window_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "shared_expert_sink": True,
    "dense_intermediate_size": 128,
    "intermediate_size": 32,
    "route_scale": 8.0,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_global_scale": True,
}


def test_a_released_config_means_what_transformers_makes_of_it(tmp_path: Path) -> None:
    heads = {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2]}
    whole = {
        "model_type": "inkling_mm_model", "text_config": RELEASED, "mtp_config": heads,
        "eos_token_id": 7, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    read = ModelFolder.open(tmp_path).config
    assert read.pattern == "L-L-LELELE*ELE*E"
    assert read.mtp is not None and read.mtp.unsupported
    assert read.eos_token_ids == (7,) and read.dtype == torch.bfloat16
    InklingConfig(**whole).text_config.save_pretrained(tmp_path)
    theirs = ModelFolder.open(tmp_path).config
    same = {"model_type": read.model_type, "eos_token_ids": (7,), "dtype": read.dtype}
    assert replace(theirs, **same, bos_token_id=read.bos_token_id) == read


def change_weights(
    folder: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_rows_of_no_token_may_be_there_or_not(tmp_path: Path, parallel: ParallelContext) -> None:
    """Of the embedding and of the head; others than these are refused."""
    (tmp_path / "padded").mkdir()
    model = TinyModel("inkling", tmp_path / "padded", parallel, unpadded_vocab_size=147)
    tokens = [token % 147 for token in random_tokens(40)]
    expected = model.expected(tokens)
    assert expected.shape[1] == 147
    close(run_in_segments(model.ours, tokens, [20, 1]), expected)

    def cut(rows: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        names = "lm_head.weight", "model.embed_tokens.weight"
        return lambda tensors: {
            name: tensor[:rows].clone() if name in names else tensor
            for name, tensor in tensors.items()
        }

    short = change_weights(tmp_path / "padded", tmp_path / "short", cut(147))
    close(run_in_segments(load(short, parallel), tokens, [20, 1]), expected)
    other = change_weights(tmp_path / "padded", tmp_path / "other", cut(150))
    with pytest.raises(WeightsError, match=r"shape \[150, 64\]; .* makes it \[147, 64\]"):
        load(other, parallel)


def test_heads_for_multi_token_prediction_are_not_read(
    tmp_path: Path, parallel: ParallelContext
) -> None:
    model = make_whole("inkling_mm_model", tmp_path / "whole", num_mtp_layers=2)
    more = {"model.mtp.layers.0.attn.wq_du.weight": torch.ones(3)}
    there = change_weights(tmp_path / "whole", tmp_path / "more", lambda tensors: tensors | more)
    check_text(model, there, parallel)
    alone = TinyModel("inkling", tmp_path, parallel)
    there = change_weights(tmp_path, tmp_path / "alone", lambda tensors: tensors | more)
    close(run_in_segments(load(there, parallel), [1, 2, 3], []), alone.expected([1, 2, 3]))
    strange = {"model.layers.0.attn.wz.weight": torch.ones(3)}
    there = change_weights(tmp_path, tmp_path / "strange", lambda tensors: tensors | strange)
    with pytest.raises(WeightsError, match="'model.layers.0.attn.wz.weight' .* has no place"):
        load(there, parallel)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_rows_of_those_that_take_turns(
    tmp_path: Path, parallel: ParallelContext, rank: int
) -> None:
    """The same as of the text part alone, whose pieces have tensors of their own."""
    model = make_whole("inkling_mm_model", tmp_path / "whole")
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


def weights_of(folder: Path, parallel: ParallelContext, rank: int) -> dict[str, Tensor]:
    """What one of two ranks has."""
    group = copy(first_of(parallel, 2).tensor)
    group.rank = rank
    experts = replace(parallel.experts, tensor=group, everyone=group)
    of_rank = replace(parallel, tensor=group, experts=experts)
    opened = ModelFolder.open(folder)
    model = HybridModel(opened.config, of_rank, *[torch.float32] * 3)
    for parameter in model.parameters():
        parameter.zero_()
    with open_folder(opened, opened.config) as source:
        put_all(place_parts(model.weight_parts(), source), source)
    return dict(model.named_parameters())


def test_quantised_rows_that_take_turns_are_refused(
    tmp_path: Path, parallel: ParallelContext
) -> None:
    make_whole("inkling_mm_model", tmp_path / "whole")

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.llm.layers.0.mlp.w13_dn.weight"
        scale = {f"{name}_scale_inv": torch.ones(2, 1)}
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn)} | scale

    there = change_weights(tmp_path / "whole", tmp_path / "quantised", quantise)
    values = json.loads((there / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (there / "config.json").write_text(json.dumps(values))
    with pytest.raises(WeightsError, match="the rows of gates and of what they are gates of take"):
        load(there, parallel)
