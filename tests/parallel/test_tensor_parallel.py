"""Two and four gloo processes give one process's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.parallel.ranks import start_ranks
from tests.parallel.worker import mixed_steps
from tests.quantized_folders import write
from tests.thorough import EVERYTHING
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]

# With two ranks: whole groups and KV heads a rank; a group, a KV head and the vocabulary that
# do not divide. With four ranks: two ranks share each group and each KV head.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h_moe": ("nemotron_h_moe", {"use_bias": True, "mlp_bias": True}),
    "bamba": ("bamba", {"mamba_n_groups": 1, "num_key_value_heads": 1, "vocab_size": 163}),
    "granite_moe_hybrid": ("granite_moe_hybrid", {"attention_bias": True}),
    "falcon_h1": ("falcon_h1", {"mamba_n_groups": 1, "attention_bias": True}),
    "zamba2": ("zamba2", {}),
    "zamba": ("zamba", {}),
    "rwkv": ("rwkv", {}),
    "xlstm": ("xlstm", {}),
    "recurrent_gemma": ("recurrent_gemma", {}),
    "mamba": ("mamba", {"use_bias": True}),
    "falcon_mamba": ("falcon_mamba", {}),
    "mamba2": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {"num_key_value_heads": 1}),
    "olmo_hybrid": (  # odd numbers of heads on a rank, and a KV head that both have
        "olmo_hybrid",
        {
            "num_key_value_heads": 1,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 6,
            "attention_bias": True,
            "vocab_size": 163,
        },
    ),
    # slopes of a number of heads that is no power of two
    "bailing_moe_linear": (
        "bailing_moe_linear",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 163},
    ),
    "bailing_moe_v2_5": ("bailing_moe_v2_5", {"group_norm_size": 1}),
    # three heads on a rank, a norm over those of both
    "minimax": ("minimax", {"num_attention_heads": 6, "num_key_value_heads": 1, "vocab_size": 163}),
    "lfm2": ("lfm2", {"conv_bias": True}),
    "lfm2_moe": ("lfm2_moe", {}),
    "qwen4_exp": ("qwen4_exp", {"num_key_value_heads": 1, "vocab_size": 163}),
    "lfm3": ("lfm3", {"num_key_value_heads": 1, "vocab_size": 163}),
    # a KV head and its windows that both have; those of sliding layers are divided
    "inkling": ("inkling", {"num_key_value_heads": 1, "vocab_size": 163}),
    "inkling2": (
        "inkling2",
        {"num_key_value_heads": 1, "vocab_size": 163, "unpadded_vocab_size": 163},
    ),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"vocab_size": 161, "tie_word_embeddings": True}),
    "kimi_linear": ("kimi_linear", {"attention_bias": True}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    # values of one rank come from the token itself, those of the other from the one before
    "zaya": ("zaya", {"attention_bias": True, "vocab_size": 163}),
    "zaya with wider filters": (
        "zaya",
        {
            "attention_bias": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "cca_time0": 3,
            "cca_time1": 3,
        },
    ),
    "glm5_next": ("glm5_next", {"attention_bias": True, "index_n_heads": 7, "vocab_size": 163}),
}
ON_FOUR_RANKS = ("nemotron_h", "bamba")
# Weights alone: inputs that are rounded are rounded by each rank for itself.
QUANTIZED = {
    "nemotron_h in NVFP4": ("nemotron_h", "compressed_nvfp4"),
    "qwen3_5_moe in 4 bits": ("qwen3_5_moe", "compressed_w4a16"),
    "lfm2 by GPTQ": ("lfm2", "gptq_v2"),
    "nemotron_h by GPTQ with act_order": ("nemotron_h", "gptq_act_order"),
    "llama by AWQ": ("llama", "awq"),
    "kimi_linear in 4 bits": ("kimi_linear", "compressed_w4a16"),
}
# What CI has of other families.
LIKE_OTHERS = {
    *("falcon_mamba", "mamba2", "zamba", "qwen3_5", "bailing_moe_v2_5", "lfm2_moe"),
    *("bailing_hybrid", "zaya with wider filters"),
    *("lfm2 by GPTQ", "llama by AWQ", "kimi_linear in 4 bits"),
}
NAMES = [name for name in (*MODELS, *QUANTIZED) if EVERYTHING or name not in LIKE_OTHERS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        if name in MODELS:
            family, overrides = MODELS[name]
            make_tiny_model(family, root / name, **overrides)
        else:
            family, format = QUANTIZED[name]
            write(root / family, format, root / name, root / f"oracle of {name}")
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def alone() -> ParallelContext:
    """The groups stay: other tests of this process use them too."""
    return initialize()


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("two")
    start_ranks(2, "tests.parallel.worker", output, *map(str, folders.values()))
    return output


@pytest.fixture(scope="module")
def four_ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("four")
    start_ranks(4, "tests.parallel.worker", output, *(str(folders[name]) for name in ON_FOUR_RANKS))
    return output


def check(name: str, folder: Path, results: Path, ranks: int, alone: ParallelContext) -> None:
    model = load_model(
        folder, device=torch.device("cpu"), dtype=None, parallel=alone, progress=False
    )
    expected = mixed_steps(model)
    for rank in range(ranks):
        result = torch.load(results / f"{name}.{rank}", weights_only=False)
        scale = max(1.0, float(expected.std()))
        torch.testing.assert_close(result["logits"], expected, atol=2e-5 * scale, rtol=2e-5)
        whole = {spec.ssm_shape for spec in model.state_specs.values()}
        assert result["ssm"] == {(shape[0] // ranks, *shape[1:]) for shape in whole}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_logits_of_one(
    name: str, folders: dict[str, Path], two_ranks: Path, alone: ParallelContext
) -> None:
    check(name, folders[name], two_ranks, 2, alone)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_ranks_that_share_groups_and_kv_heads_give_the_logits_of_one(
    name: str, folders: dict[str, Path], four_ranks: Path, alone: ParallelContext
) -> None:
    check(name, folders[name], four_ranks, 4, alone)


def test_a_rank_holds_its_part_of_the_caches(two_ranks: Path, four_ranks: Path) -> None:
    """x is split; B and C too while there are groups to split, else every rank has one."""
    split = torch.load(two_ranks / "nemotron_h.1", weights_only=False)
    assert split["conv"] == {(64 + 2 * 16, 3)} and split["kv_heads"] == {1}
    shared = torch.load(two_ranks / "bamba.1", weights_only=False)
    assert shared["conv"] == {(64 + 2 * 16, 3)} and shared["kv_heads"] == {1}
    quarter = torch.load(four_ranks / "nemotron_h.3", weights_only=False)
    assert quarter["conv"] == {(32 + 2 * 16, 3)} and quarter["kv_heads"] == {1}


def test_one_process_needs_no_launcher(alone: ParallelContext) -> None:
    ranks = alone.tensor
    assert (ranks.size, ranks.rank, alone.is_first) == (1, 0, True)
    tensor = torch.ones(2, 3)
    assert ranks.all_reduce(tensor) is tensor and ranks.all_gather(tensor) is tensor
    assert ranks.broadcast_object("hello") == "hello"
    assert initialize().tensor.group is ranks.group  # a second engine in the process


def test_more_ranks_than_processes_are_refused(alone: ParallelContext) -> None:
    with pytest.raises(ConfigurationError, match="1 process.* --tensor-model-parallel-size 2 need"):
        initialize(2)


def test_megatron_core_is_imported_for_ranks_and_for_its_own_models_alone() -> None:
    package = ROOT / "megatron_hybrid"
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(
            line.strip().startswith(("import megatron.core", "from megatron.core"))
            for line in path.read_text().splitlines()
        )
    }
    assert importers == {"parallel/megatron.py", "training/megatron.py"}
