"""Every family's logits equal transformers' full recompute, however the tokens are cut up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import Driver, Segment, run_in_segments
from tests.thorough import A_THIRD, combined
from tests.tiny_models import ATTENTION_ONLY, FAMILIES

HYBRIDS = tuple(f for f in FAMILIES if f not in ATTENTION_ONLY)
Tiny = Callable[[str], TinyModel]


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_whole_prompt(tiny: Tiny, family: str) -> None:
    model, tokens = tiny(family), random_tokens(75)
    close(run_in_segments(model.ours, tokens, []), model.expected(tokens))


SEGMENTATIONS = {
    "on the grid": [16, 32],
    "off the grid": [5, 30, 2],
    "shorter than the window": [1, 2, 3, 17],
    "prefill and decode": [40] + [1] * 34,
}


# In CI each family has one or two of them.
@pytest.mark.parametrize(("family", "segmentation"), combined(3, FAMILIES, SEGMENTATIONS))
def test_logits_do_not_depend_on_the_segmentation(
    tiny: Tiny, family: str, segmentation: str
) -> None:
    model, tokens = tiny(family), random_tokens(75, seed=1)
    lengths = SEGMENTATIONS[segmentation]
    close(run_in_segments(model.ours, tokens, lengths), model.expected(tokens))


@A_THIRD
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_mixed_batch_do_not_see_each_other(tiny: Tiny, family: str) -> None:
    """Decodes, continued prefills, new prefills and a one-token prompt in one step."""
    model = tiny(family)
    texts = [random_tokens(n, seed=n) for n in (21, 40, 33, 18, 1)]
    driver = Driver(model.ours)
    sequences = [driver.sequence() for _ in texts]
    starts = (20, 39, 16, 0, 0)
    driver.step([Segment(s, t[:n]) for s, t, n in zip(sequences, texts, starts, strict=True) if n])
    outputs = driver.step(
        [Segment(s, t[n:]) for s, t, n in zip(sequences, texts, starts, strict=True)]
    )
    for text, start, logits in zip(texts, starts, outputs, strict=True):
        close(logits, model.expected(text)[start:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_continues_any_text_with_the_same_prefix(tiny: Tiny, family: str) -> None:
    """Cold, then resumed from a state written in the middle of a segment."""
    model = tiny(family)
    prefix, first, second = random_tokens(32), random_tokens(13, seed=1), random_tokens(9, seed=2)
    driver = Driver(model.ours)
    cold, checkpoint = driver.sequence(), driver.sequence()
    driver.step([Segment(cold, prefix + first, [(32, checkpoint.slot)])])
    warm = driver.sequence()
    warm.read_slot, warm.length, warm.blocks = checkpoint.slot, 32, cold.blocks[:2]
    (logits,) = driver.step([Segment(warm, second)])
    close(logits, model.expected(prefix + second)[32:])
    (logits,) = driver.step([Segment(cold, [7])])
    close(logits, model.expected([*prefix, *first, 7])[-1:])


@A_THIRD
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_nothing_whatever_holds(tiny: Tiny, family: str) -> None:
    """Decodes with drafts, of which some hold; states that are written now and then; a checkpoint
    inside a run; a prompt beside them."""
    model, pick = tiny(family), random.Random(7)
    texts = [random_tokens(60, seed=n) for n in range(3)]
    driver = Driver(model.ours, ring_length=10)
    sequences = [driver.sequence() for _ in texts]
    driver.step([Segment(s, t[:9]) for s, t in zip(sequences, texts, strict=True)])
    checkpoint = driver.sequence()  # the state of the first one after 32 tokens
    beside = random_tokens(40, seed=9)
    other = driver.sequence()
    while min(s.length for s in sequences) < 40:
        segments, held = [], []
        for number, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            start, drafts = sequence.length, pick.randint(0, 4)
            holds = pick.randint(0, drafts)
            right = text[start : start + 1 + holds]
            wrong = [(token + 1) % 100 for token in text[start + 1 + holds : start + 1 + drafts]]
            keeps = [(32, checkpoint.slot)] if number == 0 else []
            writes = sequence.unfolded > 0 or pick.random() < 0.5
            segments.append(Segment(sequence, right + wrong, keeps, drafts, writes))
            held.append(holds)
        if other.length < 40:
            segments.append(Segment(other, beside[other.length : other.length + 8]))
        starts = [segment.sequence.length for segment in segments]
        outputs = driver.step(segments)
        # not of the one beside them
        for text, start, holds, logits in zip(texts, starts, held, outputs, strict=False):
            close(logits[: 1 + holds], model.expected(text)[start : start + 1 + holds])
        for sequence, holds in zip(sequences, held, strict=True):
            sequence.holds(holds)
    close(driver.step([Segment(other, [5])])[0], model.expected([*beside, 5])[40:])
    again = driver.sequence()
    again.read_slot, again.length = checkpoint.slot, 32
    again.blocks = sequences[0].blocks[:2]
    (logits,) = driver.step([Segment(again, [3, 1, 4, 1])])
    close(logits, model.expected([*texts[0][:32], 3, 1, 4, 1])[32:])


@A_THIRD
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_state_matters(tiny: Tiny, family: str) -> None:
    """A model whose logits ignored the past would pass the other tests with a broken cache."""
    model, tokens = tiny(family), random_tokens(40)
    driver = Driver(model.ours)
    sequence = driver.sequence()
    driver.step([Segment(sequence, tokens[:30])])
    sequence.read_slot = 0
    (logits,) = driver.step([Segment(sequence, tokens[30:])])
    assert (logits - model.expected(tokens)[30:]).abs().max() > 0.05


@A_THIRD
@pytest.mark.parametrize("family", HYBRIDS)
def test_only_the_rows_asked_for_have_logits(tiny: Tiny, family: str) -> None:
    """None at all in a step whose prompts all go on."""
    model, tokens = tiny(family).ours, random_tokens(20)
    driver = Driver(model)
    segment = Segment(driver.sequence(), tokens)
    (every,) = driver.step([segment])
    again = Driver(model)
    for wanted in ([19], [3, 0], []):
        (logits,) = again.step([Segment(again.sequence(), tokens)], wanted)
        assert logits.shape == (len(wanted), 160)
        close(logits, every[wanted])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron without latent experts": (
        "nemotron_h_moe",
        {"moe_latent_size": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "nemotron with biases": (
        "nemotron_h_moe",
        {"use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    ),
    "nemotron with clamped steps": ("nemotron_h", {"time_step_min": 0.3}),
    "bamba with one group": ("bamba", {"mamba_n_groups": 1, "tie_word_embeddings": True}),
    "bamba with biases": (
        "bamba",
        {
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": (0.05, 0.2),
        },
    ),
    "granite without experts, with rope": (
        "granite_moe_hybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": False},
    ),
    "granite with attention bias": ("granite_moe_hybrid", {"attention_bias": True}),
    "falcon-h1 with a norm, and biases": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "attention_in_multiplier": 1.0,
        },
    ),
    "falcon-h1 with the gate before the norm": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 8},
    ),
    "zamba2 with one shared block, without adapters of attention or rope": (
        "zamba2",
        {
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_key_value_heads": 2,
            "time_step_min": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "zamba with two heads, biases and fewer KV heads": (
        "zamba",
        {
            "n_mamba_heads": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "num_key_value_heads": 2,
            "mamba_dt_rank": 5,
        },
    ),
    "recurrent gemma with other blocks, a low cap and biases of attention": (
        "recurrent_gemma",
        {
            "block_types": ["attention", "recurrent"],
            "logits_soft_cap": 2.0,
            "attention_bias": True,
            "hidden_activation": "silu",
            "conv1d_width": 3,
            "lru_width": None,
            "tie_word_embeddings": True,
        },
    ),
    "xlstm of other sizes, with low caps": (
        "xlstm",
        {
            "num_heads": 2,
            "qk_dim_factor": 1.0,
            "v_dim_factor": 2.0,
            "gate_soft_cap": 15.0,
            "output_logit_soft_cap": 3.0,
            "eps": 1e-3,
        },
    ),
    "rwkv of one size": ("rwkv", {"attention_hidden_size": None, "intermediate_size": None}),
    "mamba with biases, without a bias of the convolution": (
        "mamba",
        {
            "use_bias": True,
            "use_conv_bias": False,
            "residual_in_fp32": False,
            "time_step_rank": 3,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2 with biases": ("mamba2", {"use_bias": True, "time_step_limit": (0.05, 0.2)}),
    "jamba without experts": ("jamba", {"num_experts": 1, "mamba_proj_bias": True}),
    "qwen3-next, every other layer with experts, weights not normalised": (
        "qwen3_next",
        {
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_num_value_heads": 2,
        },
    ),
    "qwen3.5 with larger values than keys": (
        "qwen3_5",
        {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
    ),
    "olmo-hybrid with positions and biases, beta up to 1": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "ring-linear with silu, one group of norms and of experts, without a dense layer": (
        "bailing_moe_linear",
        {
            "linear_silu": True,
            "group_norm_size": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_hidden_layers": 5,
            "num_shared_experts": 2,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "ling 2.5 without latents of queries, halves of positions": (
        "bailing_moe_v2_5",
        {"q_lora_rank": None, "rope_interleave": False, "num_hidden_layers": 3},
    ),
    "minimax without factors, a larger head, three heads": (
        "minimax",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "layer_types": None,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            **{
                f"{layer}_{name}_factor": 1
                for layer in ("full_attn", "linear_attn", "mlp")
                for name in ("alpha", "beta")
            },
        },
    ),
    "qwen4 with biases, other sizes of n-grams, a tied head, most gates": (
        "qwen4_exp",
        {
            "attention_bias": True,
            "hc_count": 2,
            "ngram_size": 4,
            "heads_per_ngram": 2,
            "ple_conv_kernel_size": 3,
            "ple_layer_ids": [3, 4],
            "split_ngram_parts": 1,
            "make_ngram_vocab_size_divisible_by": 7,
            "output_gate_type": None,
            "tie_word_embeddings": True,
            "eos_token_id": [126, 3],
            "seed": 5,
            "indexer_budget": 24,
            "indexer_compress_ratio": 8,
        },
    ),
    "qwen4 without n-grams, of one tap, an odd number of heads": (
        "qwen4_exp",
        {
            "ple_layer_ids": [],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
            "hc_lowrank": 1,
        },
    ),
    "qwen4 whose n-grams are pairs, with one tap": (
        "qwen4_exp",
        {"ngram_size": 2, "ple_conv_kernel_size": 1, "ple_embed_dim": 8, "eos_token_id": 55},
    ),
    "lfm2 with biases, sizes as they are": (
        "lfm2",
        {
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm3 with biases, without gates and norms behind its layers, of the usual layers": (
        "lfm3",
        {
            "attention_bias": True,
            "conv_bias": True,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "layer_types": None,
            "rope_parameters": None,
            "num_hidden_layers": 6,
            "sliding_window": 5,
        },
    ),
    "inkling of other sizes, in full layers alone, without logarithms, with three shared experts": (
        "inkling",
        {
            "layer_types": ["hybrid"] * 3,
            "mlp_layer_types": ["sparse"] * 3,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "d_rel": 17,
            "rel_extent": 5,
            "log_scaling_n_floor": None,
            "conv_kernel_size": 3,
            "n_shared_experts": 3,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-3,
        },
    ),
    "inkling in sliding layers alone, by default, without experts": (
        "inkling",
        {
            "layer_types": None,
            "mlp_layer_types": ["dense"] * 4,
            "sliding_window_size": 1,
            "conv_kernel_size": 2,
            "d_rel": 1,
        },
    ),
    "inkling2 of other sizes, in full layers alone, each with a stream": (
        "inkling2",
        {
            "layer_types": ["hybrid"] * 3,
            "num_hidden_layers": 3,
            "n_layers_per_attn_res_block": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "d_rel": 17,
            "rel_extent": 5,
            "conv_kernel_size": 2,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-3,
        },
    ),
    "inkling2 in sliding layers alone, all with one stream, by default": (
        "inkling2",
        {
            "layer_types": ["hybrid_sliding"] * 4,
            "num_hidden_layers": 4,
            "n_layers_per_attn_res_block": 6,
            "sliding_window_size": 1,
            "conv_kernel_size": 3,
            "d_rel": 1,
            "mlp_gate_softcap": 4.0,
            "mlp_up_softcap": 25.0,
            "qk_l2_clip_threshold": 22.627416997969522,
        },
    ),
    "lfm2 with experts chosen without a bias": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False},
    ),
    "kimi with biases, queries from latents, an odd number of heads": (
        "kimi_linear",
        {
            "attention_bias": True,
            "q_lora_rank": 20,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "norm_topk_prob": False,
        },
    ),
    "ling with biases, without latents of queries": (
        "bailing_hybrid",
        {"attention_bias": True, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "zaya with biases, one KV head, tied": (
        "zaya",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "num_attention_heads": 3,
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
        },
    ),
    "zaya with three KV heads, wider filters, its own positions": (
        "zaya",
        {
            "attention_bias": True,
            "num_key_value_heads": 3,
            "num_attention_heads": 6,
            "cca_time0": 2,
            "cca_time1": 4,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "sliding_window": 7,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
                for kind, theta, part in (("hybrid", 1e3, 1.0), ("hybrid_sliding", 1e2, 0.25))
            },
        },
    ),
    "zaya with a wide and a narrow filter": ("zaya", {"cca_time0": 3, "cca_time1": 1}),
    "zaya without a depthwise filter": ("zaya", {"cca_time0": 1, "cca_time1": 3}),
    "glm with biases, an odd number of heads, softplus gates, tied embeddings, pools of two": (
        "glm5_next",
        {
            "attention_bias": True,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "linear_lower_bound": None,
            "tie_word_embeddings": True,
            "index_kpool": 2,
            "index_topk": 10,
            "index_n_heads": 7,
            "hc_mult": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
    "glm of the usual layers, that chooses tokens": (
        "glm5_next",
        {
            "layer_types": None,
            "indexer_types": None,
            "mlp_layer_types": None,
            "num_hidden_layers": 8,
            "index_kpool": 1,
            "index_topk": 9,
        },
    ),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}},
    ),
    "llama 3.1 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 5e5,
            },
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3 with tied embeddings": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_the_families(variant: str, tmp_path: Path, parallel: ParallelContext) -> None:
    family, overrides = VARIANTS[variant]
    model = TinyModel(family, tmp_path, parallel, **overrides)
    tokens = random_tokens(50)
    close(run_in_segments(model.ours, tokens, [20, 28, 1]), model.expected(tokens))


def test_a_chunk_of_many_tiles(tmp_path: Path, parallel: ParallelContext) -> None:
    model = TinyModel("bamba", tmp_path, parallel, chunk_size=256)
    tokens = random_tokens(700)
    close(run_in_segments(model.ours, tokens, [256, 300]), model.expected(tokens))


@A_THIRD
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_follow_float32(
    tiny: Tiny, family: str, parallel: ParallelContext
) -> None:
    model, tokens = tiny(family), random_tokens(40)
    ours = load(model.folder, parallel, dtype=torch.bfloat16)
    logits = run_in_segments(ours, tokens, [16, 20, 1, 1])
    expected = model.expected(tokens)
    assert (logits.float() - expected).std() < 0.05 * expected.std()


def test_states_are_kept_in_the_dtype_asked_for(tiny: Tiny, parallel: ParallelContext) -> None:
    model, tokens = tiny("nemotron_h"), random_tokens(40)
    ours = load(
        model.folder,
        parallel,
        conv_states_dtype=torch.bfloat16,
        ssm_states_dtype=torch.bfloat16,
    )
    spec = ours.state_specs[0]
    assert (spec.conv_dtype, spec.ssm_dtype) == (torch.bfloat16, torch.bfloat16)
    assert spec.bytes_per_slot() == 2 * (192 * 3 + 8 * 16 * 16)
    logits = run_in_segments(ours, tokens, [16, 20, 1, 1])
    error = (logits - model.expected(tokens)).abs()
    assert error[:16].max() < 1e-4  # nothing was read from a state yet
    assert 1e-4 < error[16:].max() < 0.1
