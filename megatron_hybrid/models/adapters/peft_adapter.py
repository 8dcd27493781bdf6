"""A low-rank adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors, or the
same in memory. What it adapts is named by transformers' modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_hybrid.errors import WeightsError

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# With or without the adapter's own name at the end.
_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight$")
# Options that change what an adapter computes, and the values that change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (),
    "lora_bias": (),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "use_qalora": (),
    "use_bdlora": (),
    "arrow_config": (),
    "kasa_config": (),
    "velora_config": (),
    "monteclora_config": (),
}
# Beginnings of `init_lora_weights` that change the model's own weights, too.
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """What is added to one weight W of the model: scale * B A."""

    module: str  # as PEFT has it
    a: Tensor  # [rank, inputs]; of stacked experts [experts * rank, inputs], expert by expert
    b: Tensor  # [outputs, rank]; of stacked experts [outputs, rank * experts], rank by rank


@dataclass(frozen=True)
class PeftAdapter:
    """Its tensors are on any device, in any type."""

    where: str  # for messages
    config: Mapping[str, Any]
    low_ranks: list[LowRank]
    digest: str  # of all of it that counts

    @classmethod
    def from_folder(cls, folder: str | Path) -> PeftAdapter:
        """Raises WeightsError for a folder that is none, or of what is not supported."""
        folder = Path(folder)
        config, weights = folder / CONFIG, folder / WEIGHTS
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a folder; an adapter is a folder that PEFT saved.")
        if not config.is_file():
            raise WeightsError(f"{folder} has no {CONFIG}: it is no adapter that PEFT saved.")
        if not weights.is_file():
            advice = ""
            if (folder / PICKLED).exists():
                advice = (
                    f" Its {PICKLED} is not read: a pickle can run any program. Save the adapter "
                    "with safe_serialization=True."
                )
            raise WeightsError(f"{folder} has no {WEIGHTS}.{advice}")
        try:
            said = json.loads(config.read_text())
        except (ValueError, OSError) as error:
            raise WeightsError(f"{config} cannot be read: {error}.") from error
        try:
            tensors = load_file(weights)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{weights} cannot be read: {error}.") from error
        return cls.from_tensors(tensors, said, str(folder))

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Mapping[str, Any] | None,
        where: str = "the tensors given",
    ) -> PeftAdapter:
        """By PEFT's names, with or without "base_model.model." in front; `config`: what
        adapter_config.json says. Raises WeightsError for what is not supported."""
        if not isinstance(config, Mapping):
            raise WeightsError(
                f"The adapter in {where} comes without what {CONFIG} says (r, lora_alpha, ...)."
            )
        _check_config(config, where)
        by_name = dict(tensors)
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in by_name.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise WeightsError("An adapter's tensors are pairs of a name and a torch tensor.")
            parts = _NAME.match(name)
            if parts is None:
                raise WeightsError(f"Tensor {name!r} in {where} {_what_it_is(name)}.")
            own = found.setdefault(parts[1], {})
            if parts[2] in own:
                raise WeightsError(f"Module {parts[1]!r} in {where} has two lora_{parts[2]}.")
            own[parts[2]] = tensor.detach()
        if not found:
            raise WeightsError(f"{where} holds no adapter: there is no tensor in it.")
        low_ranks = []
        for module, both in found.items():
            if len(both) < 2:
                (there,) = both
                raise WeightsError(f"Module {module!r} in {where} has a lora_{there} alone.")
            if both["A"].ndim != 2 or both["B"].ndim != 2:
                raise WeightsError(
                    f"Module {module!r} in {where} has tensors of {both['A'].ndim} and "
                    f"{both['B'].ndim} dimensions: adapters of linear layers alone are supported."
                )
            low_ranks.append(LowRank(module, both["A"], both["B"]))
        return cls(where, dict(config), low_ranks, _digest(config, by_name))

    @property
    def swaps_experts(self) -> bool | None:
        """Whether A of stacked experts is over their outputs, as PEFT had it before 0.19; None:
        unknown."""
        found = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version")))
        return None if found is None else (int(found[1]), int(found[2])) < (0, 19)

    def check_rank(self, low_rank: LowRank, key: str, rank: int) -> None:
        """Raise WeightsError unless the configuration says this rank for a module."""
        said = _of_pattern(self.config, "rank_pattern", key, self.config["r"])
        if rank != said:
            raise WeightsError(
                f"lora_A of module {low_rank.module!r} in {self.where} is of rank {rank}; its "
                f"configuration says {said}."
            )

    def scale(self, key: str, rank: int) -> float:
        """What B A is multiplied by, for a module, or a parameter of one, of this name."""
        alpha = float(_of_pattern(self.config, "alpha_pattern", key, self.config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def _check_config(config: Mapping[str, Any], where: str) -> None:
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        kinds = int if name == "r" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise WeightsError(
                f"{name} of the adapter in {where} is {value!r}; it must be a number above 0."
            )
    for name, plain in _PLAIN.items():
        value = config.get(name)
        if value and value not in plain:
            raise WeightsError(
                f"The adapter in {where} has {name} {value!r}, which is not supported."
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_MODEL):
        raise WeightsError(
            f"The adapter in {where} was begun with init_lora_weights {init!r}, which changes the "
            "model's own weights, too: save it as a plain one (PEFT's "
            "path_initial_model_for_weight_conversion)."
        )


def _what_it_is(name: str) -> str:
    if "lora_embedding" in name:
        return "adapts an embedding, which is not supported: only linear layers are"
    if "lora_magnitude" in name:
        return "is of DoRA, which is not supported"
    if name.endswith(".bias"):
        return "is a bias, which is not supported"
    return "is no part of a low-rank adapter (lora_A, lora_B)"


def _of_pattern(config: Mapping[str, Any], pattern: str, key: str, default: Any) -> Any:
    """As PEFT's get_pattern_key."""
    for name, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({name})$", key):
            return value
    return default


# What of a configuration tells what is computed.
_COUNTS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


def _digest(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    said = {name: config.get(name) for name in _COUNTS}
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
