"""GLM-5.3's text part with a head: transformers has one only for the whole, which also sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextPreTrainedModel,
    Glm5NextTextModel,
)

__all__ = ["Glm5NextTextConfig", "Glm5NextTextForCausalLM"]


class Glm5NextTextForCausalLM(Glm5NextPreTrainedModel):
    config: Glm5NextTextConfig
    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **others: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, **others).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True)
