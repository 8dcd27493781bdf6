"""examples/launch and configs/launch: the scripts run on CPUs, and answer like one process."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.ports import free_port
from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize
from tests.parallel.launches import (
    LENGTH,
    PROMPT,
    ROOT,
    SCRIPTS,
    Client,
    Node,
    assert_ended_in_order,
    check_server,
    make_chat_model,
    wait_until,
)
from tests.thorough import thorough

CONFIGS = sorted((ROOT / "configs" / "launch").glob("*.yaml"))
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=2"  # torchrun's, of a lost machine


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process answers."""
    port = free_port()
    log = tmp_path_factory.mktemp("alone") / "log"
    with Node("one_gpu.sh", log, "--port", str(port)) as node:
        client = Client(port)
        client.wait_for_service(node)
        return [client.complete(), client.chat()]


@thorough  # test_faults.py: the script for several
def test_the_script_for_one_gpu_answers_like_the_library(alone: list[str]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    (found,) = LLM(device="cpu").generate([PROMPT], greedy, progress=False)
    assert alone[0] == found.text


@thorough  # test_end_to_end.py, test_faults.py: of one node
def test_two_nodes_answer_like_one_process_and_one_that_is_lost_is_named_and_may_come_back(
    alone: list[str], tmp_path: Path
) -> None:
    port, head = free_port(), free_port()
    flags = (
        "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2",
        "--port", str(port), "--inference-rank-timeout", "5",
    )  # fmt: skip

    def start(name: str, is_host: int) -> Node:
        # Both have the name of HEAD here; on two machines torchrun sees which one it is.
        rendezvous = f"is_host={is_host},{KEEP_ALIVE}"
        return Node(
            "two_nodes.sh", tmp_path / name, *flags,
            HEAD="localhost", HEAD_PORT=str(head), GPUS_PER_NODE="1", RENDEZVOUS=rendezvous,
        )  # fmt: skip

    client = Client(port)
    with start("first", 1) as first:
        with start("second", 0) as second:
            engine = client.wait_for_service(first, second)
            assert [client.complete(), client.chat()] == alone
            (one,), (other,) = first.ranks(), second.ranks()
            assert engine in (one, other)
            second.lose()
            wait_until(lambda: client.get("/health")[0] != 200, lambda: first.log)
            wait_until(lambda: f"(process {one}) ends" in first.log, lambda: first.log)
            pattern = rf"watchdog: rank [01] \(host \S+, process {other}, .* has said nothing for"
            assert re.search(pattern, first.log), first.log
        with start("third", 0) as third:
            client.wait_for_service(first, third, after=engine)
            assert client.complete() == alone[0]
            first.process.terminate()  # its rank lets the other one end, too
            wait_until(lambda: not third.ranks(), lambda: first.log)
    assert_ended_in_order(first, client)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model("nemotron_h_moe", tmp_path_factory.mktemp("experts") / "tiny")


@thorough  # test_lockstep.py: without a server
def test_replicas_that_share_experts_answer_like_one_process(experts: Path, tmp_path: Path) -> None:
    check_server(experts, tmp_path, tensor=2, replicas=2)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_parses_and_names_files_that_exist(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    named = re.findall(r"\$root/([\w./-]+)", script.read_text())
    assert any(name.startswith("configs/") for name in named)
    for name in named:
        assert (ROOT / name).is_file(), name


def test_two_nodes_without_a_head_are_refused_in_a_sentence() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HEAD"}
    done = subprocess.run(
        [SCRIPTS / "two_nodes.sh"], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "set HEAD to" in done.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_files_weights_fit_gpus_of_80_gb(path: Path) -> None:
    """With what the file gives to states, and four times the longest sequence."""
    config = EngineConfig.from_yaml(path)
    assert config.load is not None
    sizes = config.parallel_sizes
    parallel = initialize()

    def of_size(group, size):  # type: ignore[no-untyped-def]
        changed = type(group).__new__(type(group))
        changed.__dict__.update(group.__dict__, size=size)
        return changed

    experts = replace(
        parallel.experts,
        owners=of_size(parallel.experts.owners, sizes.expert),
        tensor=of_size(parallel.experts.tensor, sizes.tensor_of_experts),
        everyone=of_size(parallel.experts.everyone, sizes.expert_group),
    )
    parallel = replace(
        parallel,
        tensor=of_size(parallel.tensor, sizes.tensor),
        pipeline=of_size(parallel.pipeline, sizes.pipeline),
        experts=experts,
    )
    with torch.device("meta"):
        model = HybridModel(
            ModelFolder.open(Path(config.load)).config,
            parallel, torch.bfloat16, torch.bfloat16, torch.float32,
        )  # fmt: skip
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    states = config.inference_dynamic_batching_prefix_caching_mamba_gb
    assert states is not None
    assert weights + (states + 4.0) * GIB < 0.95 * 79 * GIB  # 4 GB for activations and graphs
