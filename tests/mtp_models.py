"""Tiny models with a head for multi-token prediction, and what it predicts. transformers has no
such heads, but all their layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.tiny_models import draw, make_tiny_model

_NEMOTRON_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["full_attention", "moe"],
}
# Options of the model, and the names of what is in none of the head's layers.
_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},  # whose config.json does not mention the head
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "nemotron_h": _NEMOTRON_EXPERTS,
}
_QWEN_NAMES = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "fc": "mtp.fc",
    "final_norm": "mtp.norm",
    "layers": "mtp.layers",
}
_NEMOTRON_NAMES = {
    "embedding_norm": "mtp.layers.0.enorm",
    "hidden_norm": "mtp.layers.0.hnorm",
    "fc": "mtp.layers.0.eh_proj",
    "final_norm": "mtp.layers.1.final_layernorm",
    "layers": "mtp.layers",
}
MTP_FAMILIES = tuple(_OPTIONS)


class MTPOracle(nn.Module):
    """The head beside transformers' model."""

    def __init__(self, family: str, model: PreTrainedModel, folder: Path) -> None:
        super().__init__()
        self.family, self.folder = family, folder
        self.options: dict[str, Any] = {}  # of all engines
        self.tolerance = 2e-3  # of log-probabilities
        self._model = [model]  # not a part of this module
        config = copy.deepcopy(model.config)
        size = config.hidden_size
        layers: list[nn.Module]
        norm: Any
        if family == "nemotron_h":
            config.layers_block_type = config.mtp_layers_block_type
            layers = [nemotron.NemotronHBlock(config, i) for i in range(2)]
            norm, eps = nemotron.NemotronHRMSNorm, config.layer_norm_epsilon
        else:
            config.layer_types, config.mlp_only_layers = ["full_attention"], []
            module: Any = qwen3_next if family == "qwen3_next" else qwen3_5
            prefix = "Qwen3Next" if family == "qwen3_next" else "Qwen3_5"
            layers = [getattr(module, f"{prefix}DecoderLayer")(config, 0)]
            norm, eps = getattr(module, f"{prefix}RMSNorm"), config.rms_norm_eps
        self.embedding_norm, self.hidden_norm = norm(size, eps=eps), norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(layers)
        self.final_norm = norm(size, eps=eps)

    @property
    def model(self) -> PreTrainedModel:
        return self._model[0]

    def checkpoint(self) -> dict[str, Tensor]:
        """The head's tensors by their names in a checkpoint; experts one by one, as they are in the
        released ones."""
        names = _NEMOTRON_NAMES if self.family == "nemotron_h" else _QWEN_NAMES
        found: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            first, rest = name.split(".", 1)
            name = f"{names[first]}.{rest}"
            if ".experts." not in name:
                found[name] = tensor.clone()
                continue
            stem, kind = name.rsplit(".", 1)
            for expert, whole in enumerate(tensor):
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                for own, part in zip(kinds, whole.chunk(len(kinds)), strict=True):
                    found[f"{stem}.{expert}.{own}.weight"] = part.clone()
        return found

    def hidden(self, tokens: list[int]) -> Tensor:
        """[tokens, hidden] behind the model's last norm."""
        with torch.no_grad():
            found: Tensor = self.model.model(
                torch.tensor([tokens]), use_cache=False
            ).last_hidden_state[0]
        return found

    def outputs(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """[n, hidden] of the pairs of hidden [n, hidden] and the n tokens after each."""
        model, count = self.model, len(tokens)
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(torch.tensor(tokens))
            joined = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(hidden)), dim=1)
            x = self.fc(joined)[None]
            mask = torch.full((count, count), -torch.inf).triu_(1)[None, None]
            options: dict[str, Any] = {"attention_mask": mask}
            if self.family != "nemotron_h":
                places = torch.arange(count)[None]
                if self.family == "qwen3_5":
                    places = places[None].expand(3, -1, -1)
                options["position_embeddings"] = model.model.rotary_emb(x, places)
            for layer in self.layers:
                x = layer(x, **options)
            found: Tensor = self.final_norm(x)[0]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model.lm_head(hidden)
        return found

    def chain(
        self, text: list[int], count: int, stop_ids: tuple[int, ...] = ()
    ) -> tuple[list[int], Tensor]:
        """Drafts of what follows a text, whose last token the model has not seen, and their logits
        [count, vocabulary]. In place of one that ends the answer the last token stands."""
        tokens, hidden = text[1:], self.hidden(text[:-1])
        drafts: list[int] = []
        rows: list[Tensor] = []
        for _ in range(count):
            last = self.outputs(tokens, hidden)[-1:]
            rows.append(self.logits(last)[0])
            draft = int(rows[-1].argmax())
            drafts.append(text[-1] if draft in stop_ids else draft)
            tokens, hidden = [*tokens, drafts[-1]], torch.cat((hidden, last))
        return drafts, torch.stack(rows)


def make_mtp_model(
    family: str, folder: Path, *, agrees: bool = False, seed: int = 0, **options: Any
) -> MTPOracle:
    """Save a model of one of MTP_FAMILIES with a random head. `agrees`: model and head both write
    mostly what the last token asks for, so that many drafts hold."""
    folder.mkdir(exist_ok=True)
    own = _OPTIONS[family] | options
    model = make_tiny_model(family, folder, seed=seed, **own)
    oracle = MTPOracle(family, model, folder).eval()
    generator = torch.Generator().manual_seed(17 + seed)
    with torch.no_grad():
        for name, tensor in oracle.state_dict().items():
            tensor.copy_(draw(name, tensor, generator))
        if agrees:
            _let_agree(oracle)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | oracle.checkpoint(), file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described |= {name: own[name] for name in _OPTIONS[family]}
    (folder / "config.json").write_text(json.dumps(described))
    return oracle


def _let_agree(oracle: MTPOracle, share: float = 0.25) -> None:
    """What layers add to the embedding counts for so much less."""
    for module in (oracle.model.model, oracle):
        for name, tensor in module.state_dict().items():
            if name.rsplit(".", 2)[-2] in ("o_proj", "out_proj", "down_proj") or name.endswith(
                ("experts.down_proj", "fc2_latent_proj.weight")
            ):
                tensor.mul_(share)
    size = oracle.fc.out_features
    oracle.fc.weight[:, :size] = torch.eye(size)
    oracle.fc.weight[:, size:].mul_(share)
