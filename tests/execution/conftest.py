from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.execution.steps import Steps
from tests.models.conftest import TinyModel, load


@pytest.fixture(scope="session")
def parallel() -> ParallelContext:
    """The groups stay: other tests of this process use them too."""
    return initialize()


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, parallel: ParallelContext
) -> Callable[[str], TinyModel]:
    """The tiny model of a family beside transformers', made once a session."""
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            made[family] = TinyModel(family, tmp_path_factory.mktemp(family), parallel)
        return made[family]

    return get


@pytest.fixture(scope="session")
def model(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext
) -> Callable[[str, torch.dtype], HybridModel]:
    """Our model of a family in a dtype, made once a session."""
    made: dict[tuple[str, torch.dtype], HybridModel] = {}

    def get(family: str, dtype: torch.dtype) -> HybridModel:
        if (family, dtype) not in made:
            made[family, dtype] = load(tiny(family).folder, parallel, dtype=dtype)
        return made[family, dtype]

    return get


@pytest.fixture
def steps(tiny: Callable[[str], TinyModel], parallel: ParallelContext) -> Steps:
    """A small hybrid in float32."""
    return Steps(tiny("bamba").ours, parallel)
