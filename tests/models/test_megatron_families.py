"""Which family has a model that only Megatron's arguments describe: the short rules say what the
converter finds by writing a config.json and reading it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from convert.config_json import with_model_type
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.megatron_arguments import MegatronArguments, with_family
from tests.models.megatron_models import MODELS

PATTERNS = ("M-*M-", "M*-M", "ME*EM", "*-M-", "MM", "*-*-", "M-*-", "GE*-", "G-*-", "GE*E")
CHOICES: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (False, False, True),
    "add_qkv_bias": (False, False, True),
    "qk_layernorm": (True, False),
    "attention_output_gate": (True, False),
    "apply_layernorm_1p": (True, False),
    "position_embedding_type": ("rope", "rope", "none"),
    "rotary_percent": (1.0, 0.25),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_enable_expert_bias": (True, False),
    "moe_router_topk_scaling_factor": (None, 1.5),
    "moe_router_pre_softmax": (True, False),
    "moe_shared_expert_gate": (True, False),
    "moe_shared_expert_intermediate_size": (48, 48, None),
    "moe_latent_size": (None, None, 16),
}


def test_the_rules_say_what_the_converter_finds() -> None:
    draw, found = random.Random(0), Counter[str]()
    sizes = MODELS["qwen_tp2"]["arguments"] | MODELS["hybrid_ep2"]["arguments"]
    for _ in range(8000):
        arguments = sizes | {name: draw.choice(values) for name, values in CHOICES.items()}
        gated = draw.choice((True, False))
        arguments |= {"hybrid_layer_pattern": draw.choice(PATTERNS), "swiglu": gated}
        arguments["squared_relu"] = not gated
        try:
            config = MegatronArguments(arguments, "here").config()
        except ConfigurationError:
            continue
        expected, _ = with_model_type(config)
        assert with_family(config) == expected, arguments
        found[expected.model_type] += 1
    assert set(found) == {"megatron", "nemotron_h", "llama", "qwen3", "bamba", "qwen3_next"}, found
