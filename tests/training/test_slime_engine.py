"""examples/rl/slime_engine.py, and slime's external engines, before a real server on a CPU: the
calls that slime 624b824a makes in a step, in their order. slime runs nowhere without SGLang and a
GPU, so its side is slime_doubles.py."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_hybrid.ray.arguments import as_flags
from megatron_hybrid.ray.ports import free_port
from megatron_hybrid.reference_model import path as reference_model
from megatron_hybrid.server.cli import argument_parser
from megatron_hybrid.weight_transfer.groups import GroupAddress, TorchGroup
from tests.server.running import ROOT, ServerProcess, http_server
from tests.thorough import thorough
from tests.training import slime_doubles

FLAGS = {"device": "cpu", "inference_dynamic_batching_buffer_size_gb": 0.05, "dtype": "float32"}
PROMPT = list(range(40, 100))
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    """The module slime_engine, installed as Ray's hook does it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        slime_doubles.install(monkeypatch)
        monkeypatch.syspath_prepend(str(ROOT / "examples" / "rl"))
        monkeypatch.setenv("MEGATRON_HYBRID_ROLLOUT_FLAGS", json.dumps(FLAGS))
        module = importlib.import_module("slime_engine")
        module.install()
        yield module
        for name in ("slime_engine", "rollout_server"):
            sys.modules.pop(name)


def arguments(**changes: Any) -> SimpleNamespace:
    usual = {"hf_checkpoint": str(reference_model()), "seed": 1, "offload_rollout": True}
    usual |= {"tp_size": 1, "rollout_external": False, "use_rollout_routing_replay": False}
    return SimpleNamespace(**{**usual, "sglang": {}, **changes})


@pytest.fixture
def router() -> Iterator[tuple[str, list[str]]]:
    """SGLang's, of which only its list of workers is there."""
    workers: list[str] = []

    class Router(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            workers.append(body["url"])
            self.answer({})

        def do_GET(self) -> None:
            each = [{"id": str(number), "url": url} for number, url in enumerate(workers)]
            self.answer({"workers": each})

        def do_DELETE(self) -> None:
            workers.pop(int(self.path.rpartition("/")[2]))
            self.answer({})

        def answer(self, values: Any) -> None:
            data = json.dumps(values).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Router) as url:
        yield url, workers


def generate(engine: Any, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "top_k": -1, **params}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    found: dict[str, Any] = engine._make_request("generate", body)
    return found


def send(engine: Any, weights: Weights, version: int) -> None:
    """As UpdateWeightFromDistributed, over gloo: two buckets, while the engine is paused."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    own: list[TorchGroup] = []
    address = GroupAddress("127.0.0.1", store.port, 0, 2)
    meets = threading.Thread(
        target=lambda: own.append(TorchGroup(address, "slime-pp_0", "gloo", 60.0, store))
    )
    meets.start()
    engine.init_weights_update_group(
        master_address="127.0.0.1",
        master_port=store.port,
        rank_offset=1,
        world_size=2,
        group_name="slime-pp_0",
        backend="gloo",
    )
    meets.join(60)
    engine.pause_generation()
    engine.flush_cache()
    items = list(weights.items())
    for bucket in (items[: len(items) // 2], items[len(items) // 2 :]):
        broadcasts = threading.Thread(
            target=lambda bucket=bucket: [own[0].broadcast(one.contiguous()) for _, one in bucket]
        )
        broadcasts.start()
        engine.update_weights_from_distributed(
            names=[name for name, _ in bucket],
            dtypes=[one.dtype for _, one in bucket],
            shapes=[list(one.shape) for _, one in bucket],
            group_name="slime-pp_0",
            weight_version=str(version),
        )
        broadcasts.join(60)
    engine.continue_generation()
    own[0].close()
    engine.destroy_weights_update_group("slime-pp_0")


def noisy(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def moved(weight: Tensor) -> Tensor:
        noise = torch.randn(weight.shape, generator=generator)
        return weight + (0.3 * noise * weight.float().abs().mean()).to(weight.dtype)

    return {name: moved(weight) for name, weight in weights.items()}


def test_steps_of_a_trainer_that_shares_the_device(
    ours: Any, router: tuple[str, list[str]]
) -> None:
    """With --colocate and --check-weight-update-equal: train.py's calls."""
    url, workers = router
    host, _, port = url.removeprefix("http://").rpartition(":")
    kind = importlib.import_module("slime.backends.sglang_utils.sglang_engine").SGLangEngine
    assert kind is ours.HybridEngine
    engine = kind(arguments())
    engine.init("127.0.0.1", free_port(), host, int(port))
    try:
        assert workers == [engine.get_url()] and engine.health_generate()
        weights = load_file(reference_model() / "model.safetensors")
        first = generate(engine)
        engine.check_weights("snapshot")
        engine.check_weights("reset_tensors")
        engine.release_memory_occupation()
        engine.resume_memory_occupation(["weights"])
        send(engine, weights, 1)
        engine.check_weights("compare")
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
        again = generate(engine)
        assert again["output_ids"] == first["output_ids"]
        assert again["meta_info"]["weight_version"] == engine.get_weight_version() == "1"
        logprobs = again["meta_info"]["output_token_logprobs"]
        assert [one[1] for one in logprobs] == again["output_ids"]

        engine.release_memory_occupation()
        engine.resume_memory_occupation(["weights"])
        send(engine, noisy(weights), 2)
        with pytest.raises(urllib.error.HTTPError) as refused:
            engine.check_weights("compare")
        assert refused.value.code == 400
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
        new = generate(engine)
        assert new["output_ids"] != first["output_ids"]
        assert new["meta_info"]["weight_version"] == "2"
        assert new["meta_info"]["cached_tokens"] == 0
        engine.update_weights_from_disk(str(reference_model()), weight_version="3")
        assert generate(engine)["output_ids"] == first["output_ids"]
    finally:
        engine.shutdown()
    assert workers == [] and engine.process.exit_code is not None
    with pytest.raises(urllib.error.URLError):
        engine.health_generate()


@thorough
def test_an_engine_that_runs_already_needs_no_code(ours: Any) -> None:
    """--rollout-external-engine-addrs: slime asks what it is, and compares what it expects."""
    command = ("-m", "megatron_hybrid.cli", "serve", *as_flags({**FLAGS, "port": 0}))
    with ServerProcess(*command, OMP_NUM_THREADS="1") as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        address = (host, int(port), None, None)
        external = {"rollout_external": True, "offload_rollout": False}
        engine = slime_doubles.SGLangEngine(arguments(**external))
        engine.init(*address)
        info = engine.get("server_info")
        assert info["num_gpus"] == info["tp_size"] == info["pp_size"] == 1
        assert engine.get("get_server_info") == info
        send(engine, load_file(reference_model() / "model.safetensors"), 4)
        assert generate(engine)["meta_info"]["weight_version"] == "4"
        for other in ({"offload_rollout": True}, {"use_rollout_routing_replay": True}):
            with pytest.raises(AssertionError):
                slime_doubles.SGLangEngine(arguments(**{**external, **other})).init(*address)
        engine.shutdown()
        assert engine.health_generate(), "it belongs to somebody else"


def test_slimes_arguments_become_our_flags(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "model_path": "model", "random_seed": 0, "enable_memory_saver": True, "tp_size": 4,
        "pp_size": 2, "ep_size": 4, "mem_fraction_static": 0.7, "context_length": 4096,
        "max_running_requests": 64, "chunked_prefill_size": 2048, "dtype": "float16",
        "kv_cache_dtype": "auto", "disable_radix_cache": True, "disable_cuda_graph": True,
        "enable_return_routed_experts": False, "attention_backend": "fa3", "base_gpu_id": 4,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        flags = ours.server_flags(given, slime_doubles.ServerArgs)
    assert [one.getMessage() for one in caplog.records] == [
        "SGLang's attention_backend = 'fa3' has no effect on this server."
    ]
    args = vars(argument_parser().parse_args(as_flags(flags)))
    assert (args["load"], args["seed"], args["dtype"]) == ("model", 0, "float16")
    assert args["tensor_model_parallel_size"] == args["expert_model_parallel_size"] == 4
    assert args["pipeline_model_parallel_size"] == 2 and args["enable_sleep_mode"] is True
    assert args["gpu_memory_utilization"] == 0.7 and args["inference_max_seq_length"] == 4096
    assert args["inference_dynamic_batching_max_requests"] == 64
    assert args["inference_dynamic_batching_max_tokens"] == 2048
    assert args["inference_dynamic_batching_prefix_caching"] is False
    assert args["inference_dynamic_batching_num_cuda_graphs"] == 0
    for wrong in ({"nnodes": 2}, {"dp_size": 2}, {"disaggregation_mode": "prefill"}):
        with pytest.raises(NotImplementedError):
            ours.server_flags({**given, **wrong}, slime_doubles.ServerArgs)


def test_a_server_that_ends_at_its_start_says_why(ours: Any, tmp_path: Path) -> None:
    engine = ours.HybridEngine(arguments(hf_checkpoint=str(tmp_path / "nothing")))
    with pytest.raises(RuntimeError, match="nothing"):
        engine.init("127.0.0.1", free_port(), None, None)
