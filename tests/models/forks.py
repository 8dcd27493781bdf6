"""Forks of the tests' tiny models: other values of what a family's configuration says, as somebody
might write them, and whether the model that has them gives transformers' logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import load, random_tokens
from tests.models.driver import run_in_segments
from tests.tiny_families import TINY
from tests.tiny_models import make_tiny_model, tiny_configuration

Fork = dict[str, Any]
# Whose configuration transformers reads.
TRANSFORMERS = tuple(name for name, tiny in TINY.items() if tiny.source != "tests.ring_linear")

# Of training, of answers, or of how transformers computes: they change no logits.
_BESIDE = set(
    """
    _name_or_path architectures attention_dropout attention_probs_dropout_prob bos_token_id
    chunk_size_feed_forward dtype hidden_dropout id2label initializer_range is_encoder_decoder
    label2id model_type mtp_loss_scaling_factor num_logits_to_keep output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
    rescale_prenorm_residual return_dict router_aux_loss_coef time_step_floor
    time_step_init_scheme time_step_max time_step_scale transformers_version use_cache
    use_mamba_kernels vocab_size
    """.split()
)
# Of few heads many groups score 0, of which none is the best; and token ids must be known.
_UNCLEAR = {"index_n_heads", "indexer_n_heads", "unpadded_vocab_size"}
_ACTIVATIONS = ["gelu", "silu", "gelu_pytorch_tanh", "relu2"]
_LAYERS = ["full_attention", "sliding_attention", "linear_attention", "moe"]
_ORIGINAL = {"factor": 8.0, "original_max_position_embeddings": 32}
_ROTATIONS: list[Fork] = [
    {"rope_type": "default", "rope_theta": 3e4},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", **_ORIGINAL},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **_ORIGINAL},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def of_one_field(family: str) -> list[Fork]:
    """Every one with another value of one field."""
    fields = tiny_configuration(family).to_dict()
    return [
        {name: value}
        for name, usual in sorted(fields.items())
        if name not in _BESIDE | _UNCLEAR and not name.startswith("_")
        for value in _others(name, usual)
    ]


def of_some_fields(family: str, count: int, seed: int = 0) -> list[Fork]:
    """So many with other values of one to four fields."""
    ones, pick = of_one_field(family), random.Random(seed)
    chosen = (pick.sample(ones, pick.randint(1, 4)) for _ in range(count))
    return [{name: fork[name] for fork in forks for name in fork} for forks in chosen]


def _others(name: str, usual: Any) -> list[Any]:
    """Plausible values beside the usual one."""
    values: list[Any] = []
    match usual:
        case bool():
            values = [not usual]
        case int() if name == "num_hidden_layers":
            values = [1, 2, 5, 9]
        case int() if "position" in name or "max_length" in name or "context" in name:
            values = [30]  # fewer than the text has
        case int():
            values = [1, 3, usual + 1, 2 * usual, usual // 2, usual // 3, usual + 8]
            values = [value for value in values if 0 < value <= 256]
        case float():
            values = [0.1] if "eps" in name else [2 * usual, usual / 2, 1.0]
        case str():
            values = _ACTIVATIONS if "act" in name else [None]
        case [str(), *_]:
            values = [usual[::-1], usual[:-1], [usual[0]] * len(usual), None]
            values += [[kind, *usual[1:]] for kind in _LAYERS]
        case [int() | float(), *_]:
            values = [[value + 1 for value in usual], usual[::-1], usual[:-1]]
        case dict() if usual and all(isinstance(inner, dict) for inner in usual.values()):
            values = [usual | {kind: usual[kind] | new} for kind in usual for new in _ROTATIONS]
        case dict() if "rope" in name:
            values = [usual | new for new in _ROTATIONS]
        case None:
            values = [1, 3, True]
    return [value for value in values if value != usual]


def outcome(family: str, fork: Fork, folder: Path, parallel: ParallelContext) -> str:
    """What comes of it: "equal", "different", our sentence that refuses it, or "no oracle" where
    transformers does not compute it; then it has to be refused, or computed by us. Raises whatever
    else is raised."""
    chunk, fork = TINY[family].chunk, dict(fork)
    if chunk in fork:
        fork["chunk_size"] = fork.pop(chunk)
    tokens, expected = random_tokens(45), None
    try:
        theirs = make_tiny_model(family, folder, **fork)
    except Exception:
        return "no oracle"
    theirs.set_experts_implementation("eager")  # of any size
    try:
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens]), use_cache=False).logits[0].float()
    except Exception:
        expected = torch.tensor(torch.nan)
    try:
        logits = run_in_segments(load(folder, parallel), tokens, [30, *[1] * 9])
    except (ConfigurationError, WeightsError) as error:
        return str(error)
    if not expected.isfinite().all():
        return "no oracle"
    same = torch.allclose(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    return "equal" if same else "different"
