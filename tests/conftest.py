"""Without a GPU Triton's kernels run in its interpreter, which is chosen when triton is imported:
before any test module does that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from megatron_hybrid.text.tokenizer import Tokenizer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")

# Files that take about a minute or more begin first, the longest ones before the others, so that at
# the end no process is left with one of them; those that compute beside those that wait.
LONG = """
    engine/test_oracle_blocks parallel/test_faults engine/test_oracle_mamba2
    parallel/test_launch_files engine/test_oracle_mamba1 parallel/test_lockstep
    engine/test_oracle_gated_delta_net processes/test_end_to_end engine/test_state_machine
    processes/test_processes kernels/test_mamba2_scan_triton replicas/test_replicas
    parallel/test_pipeline engine/test_sharing_figures tools/test_tools
    execution/test_graph_steps http/test_dashboard http/test_openapi
    parallel/test_engine_on_two_ranks
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return places.get(f"{item.path.parent.name}/{item.path.stem}", len(places))

    items.sort(key=place)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.text.make_tokenizers import byte_level, save

    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from megatron_hybrid.text.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_folder)
