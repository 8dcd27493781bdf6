"""Which processes are started together, and what is said of those that do not fit."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.choices import resolve_device
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import ParallelSizes, RankLayout


@pytest.mark.parametrize("names", [(), ("MASTER_ADDR", "MASTER_PORT"), ("RANK", "WORLD_SIZE")])
def test_a_process_without_torchrun_is_alone(names: tuple[str, ...]) -> None:
    """A shell may name the place where launches that it starts shall meet."""
    layout = RankLayout.from_environment(ParallelSizes(), dict.fromkeys(names, "3"))
    assert (layout.rank, layout.world_size) == (0, 1)


def test_too_few_processes_are_refused_by_the_flag_that_wants_more() -> None:
    with pytest.raises(ConfigurationError, match="1 process.*--expert-tensor-parallel-size 2 need"):
        RankLayout(ParallelSizes(expert_tensor=2))


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"1 GPU\(s\).*--nproc-per-node"):
        resolve_device(EngineConfig())
