"""What transformers' routers choose in a full recompute: the oracle of routed experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_hybrid import LLM, RequestOutput
from tests.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = npt.NDArray[Any]

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": BLOCK,
    "inference_dynamic_batching_buffer_size_gb": 0.01,
    "inference_dynamic_batching_max_requests": 16,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
}


@dataclass
class Routers:
    """A tiny model and its routers' choices."""

    folder: Path
    model: PreTrainedModel
    text: list[int]
    known: dict[tuple[int, ...], Ids] = field(default_factory=dict)

    @classmethod
    def of(cls, family: str, folder: Path, **overrides: Any) -> Routers:
        model = make_tiny_model(family, folder, **overrides)
        generator = torch.Generator().manual_seed(11)
        return cls(folder, model, torch.randint(0, 160, (1500,), generator=generator).tolist())

    def llm(self, **options: Any) -> LLM:
        every = {"enable_return_routed_experts": True, **OPTIONS, **options}
        return LLM(str(self.folder), **every)

    def prompts(self, *lengths: int) -> list[list[int]]:
        """That share nothing."""
        return [self.text[90 * i : 90 * i + length] for i, length in enumerate(lengths)]

    def choices(self, tokens: Sequence[int]) -> Ids:
        """[tokens, num_hidden_layers, top_k], ascending in each: of one forward pass without a
        cache."""
        if (found := self.known.get(tuple(tokens))) is not None:
            return found
        taken: dict[int, Ids] = {}

        def taker(layer: int) -> Callable[[Any, Any, Any], None]:
            def take(module: Any, _: Any, given: Any) -> None:
                ids = next(one for one in given if not one.is_floating_point())
                if "Zaya" in type(module).__name__:  # the first one, with weight 0, stands for none
                    ids = ids.masked_fill(given[1] == 0, module.num_experts)
                taken[layer] = ids.numpy()

            return take

        hooks = [
            module.register_forward_hook(taker(int(re.findall(r"layers\.(\d+)\.", name)[0])))
            for name, module in self.model.named_modules()
            if type(module).__name__.lower().endswith(("topkrouter", "zayarouter"))
        ]
        with torch.no_grad():
            self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        (shape,) = {one.shape for one in taken.values()}
        every = np.zeros((shape[0], self.model.config.num_hidden_layers, shape[1]), dtype=np.int64)
        for layer, one in taken.items():
            every[:, layer] = np.sort(one, axis=-1)
        self.known[tuple(tokens)] = every
        return every

    def check(self, output: RequestOutput, start: int = 0) -> None:
        """Of prompt and answer without its last token."""
        tokens = output.prompt_token_ids + output.token_ids
        self.check_ids(tokens, output.routed_experts, start)

    def check_ids(self, tokens: list[int], found: Ids | None, start: int = 0) -> None:
        assert found is not None and found.dtype == np.uint8
        expected = self.choices(tokens)[start : len(tokens) - 1]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(np.sort(found, axis=-1), expected)
