"""What the hardware allows, against models small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.limits import LIMITED, Rates, Shape, limits_table, over_limits, shape_of
from bench.workloads import make_workload
from megatron_hybrid import EngineConfig
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig
from megatron_hybrid.layers.shared_transformer import SharedTransformerConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weight_shares import WeightShare
from megatron_hybrid.parallel import initialize

CONFIGS = Path(__file__).parents[3] / "configs"
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
SMALL = HybridModelConfig(
    model_type="small",
    pattern="M*E",
    vocab_size=16,
    hidden_size=8,
    max_position_embeddings=64,
    norm_eps=1e-5,
    dtype=torch.bfloat16,
    attention=ATTENTION,
    mamba=Mamba2Config(
        num_heads=2, head_dim=4, state_size=3, num_groups=1, conv_width=4, kernel_chunk=8
    ),
    moe=MoEConfig(4, 1, MLPConfig(5, gated=True, activation="silu"), shared=None),
)
# Parameters of SMALL's blocks, each with its norm.
MAMBA = 8 + 8 * (2 * 8 + 2 * 3 + 2) + 14 * 4 + 14 + 3 * 2 + 8 + 8 * 8
ATTENDING = 8 + 8 * (8 + 2 * 4) + 8 * 8
EXPERTS = 4 * 3 * 5 * 8
ROUTER = 8 + 4 * 8
VOCABULARY = 16 * 8
# Bytes of a sequence's states, the convolution's and the recurrence's.
STATES = 14 * 3 * 2 + 2 * 4 * 3 * 4


def shape(config, formats=lambda block, role: None, write_interval=2):
    with torch.device("meta"):
        dtypes = torch.bfloat16, torch.bfloat16, torch.float32
        model = HybridModel(config, initialize(), *dtypes, formats=formats)
    return Shape.of(model, write_interval)


def test_parameters_of_the_model_and_of_a_token():
    small = shape(SMALL)
    blocks = MAMBA + ATTENDING + ROUTER
    assert small.parameters == blocks + EXPERTS + 2 * VOCABULARY + 8
    assert small.a_tokens == blocks + EXPERTS / 4


def test_bytes_of_a_decode_are_weights_chosen_experts_states_and_kv():
    # Mamba2's step sizes, A and D are in float32.
    weights = 2 * (MAMBA + ATTENDING + ROUTER + VOCABULARY) + 2 * 3 * 2
    # Two tokens choose an expert each of four: 4 (1 - (3/4)^2) = 7/4 of them.
    experts = 2 * EXPERTS * 7 / 16
    sequence = 2 * 8 + 1.5 * STATES + 2 * 2 * 4 * (10 + 1)
    assert shape(SMALL).decode_bytes(2, 10) == weights + experts + 2 * sequence


def test_states_that_are_written_in_every_step_cost_twice_their_bytes():
    more = shape(SMALL, write_interval=1).decode_bytes(3, 10)
    assert more - shape(SMALL).decode_bytes(3, 10) == 3 * STATES / 2


def test_products_of_prompts_leave_out_what_only_last_tokens_need():
    every, last = MAMBA + ATTENDING, ROUTER + EXPERTS / 4 + VOCABULARY
    pairs = 3 * 4 / 2 + 5 * 6 / 2
    flop = 2 * (every * (3 + 5) + last * 2) + 2 * 2 * (2 * 4) * pairs
    assert shape(SMALL).prompt_flop([3, 5]) == flop


def test_a_tied_head_is_read_where_the_embedding_is():
    tied, own = shape(replace(SMALL, tie_word_embeddings=True)), shape(SMALL)
    assert own.parameters - tied.parameters == VOCABULARY
    assert own.decode_bytes(1, 10) == tied.decode_bytes(1, 10)


def test_quantised_weights_count_in_the_bytes_of_their_format():
    def formats(block, role):
        return WeightFormat("float8_e4m3fn") if "experts" in role else None

    rounded, plain = shape(SMALL, formats), shape(SMALL)
    assert rounded.parameters == plain.parameters
    assert rounded.prompt_flop([4]) == plain.prompt_flop([4])
    saved = plain.decode_bytes(1000, 10) - rounded.decode_bytes(1000, 10)
    rows = 4 * (2 * 5 + 8)  # of gate, up and down of each expert; each has a scale in float32
    assert saved == EXPERTS - 4 * rows


def test_a_transformer_that_blocks_share_is_read_by_each():
    mlp = MLPConfig(5, gated=True, activation="silu")
    shared = SharedTransformerConfig(
        ATTENTION, mlp, num_blocks=1, adapter_rank=1, attention_adapters=False
    )
    config = replace(SMALL, pattern="ZZ", shared_transformer=shared)
    once, twice = shape(replace(config, pattern="Z")), shape(config)
    inner = 16 + 16 * (8 + 2 * 4) + 8 * 8 + 8 + 3 * 5 * 8
    own = MAMBA + 8 + 10 + 8 * 8  # adapters of the MLP, the projection
    assert twice.parameters - once.parameters == own
    assert twice.a_tokens - once.a_tokens == own + inner
    assert twice.attention_sizes == 2 * once.attention_sizes == 2 * 2 * 4


def test_a_token_reads_the_experts_that_it_chooses_and_many_read_all():
    weights = WeightShare(1000, 2000, experts=64, chosen=6)
    assert weights.a_tokens == 1000 * 6 / 64
    assert weights.read_by(1) == pytest.approx(2000 * 6 / 64)
    assert weights.read_by(10_000) == pytest.approx(2000)
    assert WeightShare(1000, 2000).read_by(1) == 2000


@pytest.mark.parametrize("name", LIMITED)
def test_limits_of_workloads_are_bytes_or_products_at_a_rate(name):
    small, workload = shape(SMALL), make_workload(name, 2, scale=0.01)
    limit = small.limit(workload, Rates(copy=1e6, product=1e3))
    counts = workload.token_counts()
    if name.startswith("decode"):
        # 10 tokens of prompt, 3 of answer
        assert limit.unit == "ms"
        assert limit.value == pytest.approx(small.decode_bytes(counts.requests, 11.5) / 1e3)
    else:
        lengths = [counts.prompt_tokens // counts.requests] * counts.requests
        assert limit.unit == "s"
        assert limit.value == pytest.approx(small.prompt_flop(lengths) / 1e3)


def test_what_was_measured_stands_over_its_limit():
    small, rates = shape(SMALL), Rates(copy=1e6, product=1e3)
    decode, prompts = (make_workload(name, 2, scale=0.01) for name in ("decode_1", "prompts_8k"))
    measured = {"wall_s": 2.0, "steady_itl_ms": {"mean": 9.0}}
    table = over_limits([(measured, decode), (measured, prompts)], small, rates)
    ratios = [line.split("|")[4].strip() for line in table.splitlines()[2:]]
    limits = small.limit(decode, rates).value, small.limit(prompts, rates).value
    assert ratios == [f"{9.0 / limits[0]:.2f}", f"{2.0 / limits[1]:.2f}"]


def test_a_shape_that_ships_has_the_limits_that_its_bytes_give():
    config = EngineConfig.from_yaml(CONFIGS / "nemotron-h-8b.yaml")
    nemotron = shape_of(config)
    # 8.10 B parameters, 0.54 B of which are the embedding; the head has as many.
    assert nemotron.parameters == pytest.approx(8.10e9, rel=0.005)
    assert nemotron.a_tokens == pytest.approx(7.03e9, rel=0.005)
    workload = make_workload("decode_1", 2)
    assert nemotron.limit(workload, Rates()).value == pytest.approx(3.56, rel=0.01)
    rounded = shape_of(replace(config, quantization="fp8", kv_cache_dtype="fp8_e4m3"))
    assert rounded.kv_bytes == nemotron.kv_bytes / 2
    # All but the head's 1.07 GB is halved.
    assert rounded.limit(workload, Rates()).value == pytest.approx(1.92, rel=0.02)


def test_shapes_stand_in_a_row_each():
    workloads = [make_workload(name, 2, scale=0.01) for name in ("decode_1", "unique")]
    small = replace(shape(SMALL), parameters=8_100_000_000)
    lines = limits_table({"a": small, "b": small}, workloads, Rates()).splitlines()
    assert "decode_1, ms | unique, s" in lines[0]
    assert [line.split()[1] for line in lines[2:]] == ["a", "b"]
    assert "8.10 B" in lines[2]
