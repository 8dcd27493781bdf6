from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def parallel() -> ParallelContext:
    """The groups stay: other tests of this process use them too."""
    return initialize()


class TinyModel:
    """A family's tiny model: its folder, transformers' model and ours."""

    def __init__(
        self, family: str, folder: Path, parallel: ParallelContext, **overrides: Any
    ) -> None:
        self.folder = folder
        self.theirs: PreTrainedModel = make_tiny_model(family, folder, **overrides)
        self.ours: HybridModel = load(folder, parallel)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def expected(self, tokens: list[int]) -> Tensor:
        """transformers' logits [tokens, vocab] by full recompute, once for each text."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.no_grad():
                logits: Tensor = self.theirs(torch.tensor([tokens]), use_cache=False).logits
            self._known[key] = logits[0].float()
        return self._known[key]


def load(folder: Path, parallel: ParallelContext, **options: Any) -> HybridModel:
    return load_model(
        folder,
        device=torch.device("cpu"),
        dtype=options.pop("dtype", None),
        parallel=parallel,
        progress=False,
        **options,
    )


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, parallel: ParallelContext
) -> Callable[[str], TinyModel]:
    """The tiny model of a family, made once a session."""
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            made[family] = TinyModel(family, tmp_path_factory.mktemp(family), parallel)
        return made[family]

    return get


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 160, (count,), generator=generator).tolist()
