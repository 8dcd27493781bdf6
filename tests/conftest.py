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

# Without a GPU nothing of it runs: a fifth of all cases, to be imported, made and reported.
collect_ignore = [] if EVERYTHING or torch.cuda.is_available() else ["gpu"]

pytest.register_assert_rewrite("tests.engine.oracle_tests", "tests.kernels.recurrence_contract")

# The files that take longest begin first, so that at the end no process is left with one of them;
# those that compute beside those that wait.
LONG = """
    http/test_openapi engine/test_batch_invariant processes/test_processes engine/test_oracle_blocks
    parallel/test_lockstep models/test_logits replicas/test_replicas engine/test_oracle_mamba2
    processes/test_end_to_end engine/test_oracle_mamba1 disaggregation/test_handing_over
    kernels/test_experts_triton parallel/test_batch_invariant_ranks engine/test_head_drafts
    replicas/test_external_router kernels/test_latent_attention_triton parallel/test_faults
    http/test_turns_of_a_model parallel/test_engine_on_two_ranks kernels/test_experts_in_order
    kernels/test_compile_ahead engine/test_batch_invariant_options parallel/test_pipeline
    execution/test_graph_steps weight_transfer/test_from_a_trainer server/test_named_models
    kernels/test_indexed_attention kv_events/test_events_follow_the_cache tools/test_check_exactness
    simulation/test_indexed_routers engine/test_draft_policy engine/test_routed_experts
    kernels/test_runs_triton engine/test_lora_ways engine/test_oracle_streams tools/test_tools
    parallel/test_tensor_parallel kernels/test_experts_prompts_triton engine/test_oracle_indexed
    training/test_rl_example kernels/test_linear_triton engine/test_oracle_fp8_kv
    http/test_drafts_over_http engine/test_oracle_windows models/test_megatron_checkpoint
    processes/test_readme training/test_verl_rollout processes/test_ready_to_run
    engine/test_state_machine
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
