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

from tests.thorough import A_THIRD, EVERYTHING, thorough

if TYPE_CHECKING:
    from megatron_hybrid.text.tokenizer import Tokenizer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Without a GPU all of it is skipped, and importing it would be a tenth of what collecting takes.
collect_ignore = [] if EVERYTHING or torch.cuda.is_available() else ["gpu"]

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")

# The files that take longest begin first, so that at the end no process is left with one of them;
# those that compute beside those that wait.
LONG = """
    http/test_openapi engine/test_oracle_blocks replicas/test_replicas engine/test_batch_invariant
    parallel/test_engine_on_two_ranks kernels/test_experts_triton parallel/test_faults
    engine/test_oracle_mamba2 processes/test_processes kernels/test_experts_in_order
    processes/test_end_to_end tools/test_tools training/test_rl_example kernels/test_linear_triton
    disaggregation/test_handing_over verify/test_verify parallel/test_lockstep
    engine/test_head_drafts kernels/test_compile_ahead engine/test_oracle_mamba1
    replicas/test_external_router kernels/test_runs_triton http/test_dashboard
    tools/test_check_exactness weight_transfer/test_from_a_trainer kernels/test_sampling_triton
    http/test_page_chats models/test_logits execution/test_graph_steps engine/test_oracle_fp8_kv
    parallel/test_pipeline engine/test_state_machine training/test_verl_rollout
    engine/test_oracle_gated_delta_net processes/test_ready_to_run simulation/test_driver
    kernels/test_attention_by_split http/test_page_answers engine/test_routed_experts
    kernels/test_causal_conv1d_triton http/test_page_figures engine/test_fuzz
""".split()


# What is imported and collected stays: a third of the time that collecting takes goes into looking
# for garbage there, and as much into each later look at all objects, of which sleep takes one.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # when the folders' own have said what is thorough
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_two_thirds(items)
    if not EVERYTHING:
        leave_out_thorough_ones(config, items)
    places = {name: place for place, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return places.get(f"{item.path.parent.name}/{item.path.stem}", len(places))

    items.sort(key=place)


def leave_out_two_thirds(items: list[pytest.Item]) -> None:
    """Of the cases of each test with A_THIRD that are not thorough in any case, those whose names'
    digests are largest."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(A_THIRD.name) and not item.get_closest_marker(thorough.name):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        alike.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in alike[-(-len(alike) // 3) :]:
            item.add_marker(thorough)


def leave_out_thorough_ones(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker(thorough.name) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.text.make_tokenizers import byte_level, save

    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from megatron_hybrid.text.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_folder)
