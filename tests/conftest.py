"""Without a GPU Triton's kernels run in its interpreter, which is chosen when triton is imported:
before any test module does that."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
import torch

from tests.thorough import A_THIRD, thorough

if TYPE_CHECKING:
    from megatron_hybrid.text.tokenizer import Tokenizer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")

# The files that take longest begin first, so that at the end no process is left with one of them;
# those that compute beside those that wait.
LONG = """
    replicas/test_replicas execution/test_graph_steps engine/test_oracle_blocks http/test_dashboard
    engine/test_oracle_gated_delta_net parallel/test_launch_files engine/test_oracle_mamba1
    processes/test_processes engine/test_oracle_mamba2 parallel/test_faults http/test_openapi
    kernels/test_mamba2_scan_triton parallel/test_lockstep engine/test_sharing_figures
    processes/test_end_to_end engine/test_drafts engine/test_head_drafts engine/test_state_machine
    engine/test_fuzz parallel/test_pipeline http/test_drafts_over_http
    engine/test_batch_invariant tools/test_check_exactness kernels/test_experts_triton
    kernels/test_compile_ahead kernels/test_linear_triton
""".split()


# What is imported and collected stays: a third of the time that collecting takes goes into looking
# for garbage there, and as much into each later look at all objects, of which sleep takes one.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_out_two_thirds(items)
    places = {name: place for place, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return places.get(f"{item.path.parent.name}/{item.path.stem}", len(places))

    items.sort(key=place)


def leave_out_two_thirds(items: list[pytest.Item]) -> None:
    """Of the cases of each test with A_THIRD, those whose names' digests are largest."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(A_THIRD.name):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        alike.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in alike[-(-len(alike) // 3) :]:
            item.add_marker(thorough)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.text.make_tokenizers import byte_level, save

    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from megatron_hybrid.text.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_folder)
