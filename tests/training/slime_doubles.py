"""What examples/rl/slime_engine.py extends, for machines without slime (624b824a) and SGLang: the
engine's calls, with slime's bodies, and how it computes SGLang's arguments."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from typing import Any

import psutil
import pytest

from tests.training.doubled_modules import install_modules


@dataclasses.dataclass
class ServerArgs:
    """Some of SGLang's, with its defaults."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    nccl_port: int | None = None
    dist_init_addr: str | None = None
    random_seed: int | None = None
    enable_memory_saver: bool = False
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    trust_remote_code: bool = False
    skip_server_warmup: bool = False
    enable_metrics: bool = False
    enable_draft_weights_cpu_backup: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    context_length: int | None = None
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    disaggregation_mode: str = "null"
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras_per_batch: int = 8
    enable_return_routed_experts: bool = False
    enable_deterministic_inference: bool = False
    attention_backend: str | None = None


NOT_COMPARED = {
    *("model_path", "trust_remote_code", "random_seed", "host", "port", "nccl_port", "nnodes"),
    *("node_rank", "dist_init_addr", "gpu_id_step", "base_gpu_id", "tp_size", "dp_size"),
    *("pp_size", "ep_size", "skip_server_warmup", "enable_draft_weights_cpu_backup"),
    *("enable_metrics", "mem_fraction_static"),
}


class SGLangEngine:
    """`sglang` in args: what --sglang-... flags say."""

    process: Any

    def __init__(self, args: Any, rank: int = 0) -> None:
        self.args, self.rank, self.node_rank = args, rank, 0

    def init(self, host: str, port: int, router_ip: str | None, router_port: int | None) -> None:
        self.router_ip, self.router_port = router_ip, router_port
        self.server_host, self.server_port = host, port
        own = {
            "model_path": self.args.hf_checkpoint,
            "trust_remote_code": True,
            "random_seed": self.args.seed + self.rank * 8,
            "enable_memory_saver": self.args.offload_rollout,
            "host": host,
            "port": port,
            "nccl_port": 1,
            "nnodes": 1,
            "node_rank": 0,
            "dist_init_addr": f"{host}:1",
            "gpu_id_step": 1,
            "base_gpu_id": 0,
            "tp_size": self.args.tp_size,
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "skip_server_warmup": True,
            "enable_draft_weights_cpu_backup": True,
            "enable_metrics": True,
        }
        if self.args.use_rollout_routing_replay:
            own["enable_return_routed_experts"] = True
        compared = own.keys() - NOT_COMPARED
        usual = {
            one.name: one.default
            for one in dataclasses.fields(ServerArgs)
            if one.default is not dataclasses.MISSING
        }
        arguments = {**usual, **self.args.sglang, **own}
        if not self.args.rollout_external:
            self._init_normal(arguments)
            return
        actual = self.get("server_info")
        assert all(actual.get(name) == arguments[name] for name in compared), actual
        self._register_to_router(arguments)

    def _init_normal(self, server_args_dict: dict[str, Any]) -> None:
        raise NotImplementedError("SGLang is not here.")

    def _register_to_router(self, server_args_dict: dict[str, Any]) -> None:
        if self.router_ip:
            url = f"http://{self.router_ip}:{self.router_port}/workers"
            ask(url, {"url": self.get_url(), "worker_type": "regular"})

    def get_url(self) -> str:
        return f"http://{self.server_host}:{self.server_port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.get_url()}/{path}", timeout=60) as answer:
            return json.load(answer)

    def _make_request(self, endpoint: str, payload: dict[str, Any] | None = None) -> Any:
        return ask(f"{self.get_url()}/{endpoint}", payload or {})

    def health_generate(self) -> bool:
        self.get("health_generate")
        return True

    def flush_cache(self) -> None:
        with urllib.request.urlopen(f"{self.get_url()}/flush_cache", timeout=60) as answer:
            assert answer.status == 200

    def shutdown(self) -> None:
        if self.args.rollout_external:
            return
        if self.router_ip:
            router = f"http://{self.router_ip}:{self.router_port}/workers"
            with urllib.request.urlopen(router, timeout=60) as answer:
                for one in json.load(answer)["workers"]:
                    if one["url"] == self.get_url():
                        gone = urllib.request.Request(f"{router}/{one['id']}", method="DELETE")
                        urllib.request.urlopen(gone, timeout=60).close()
        try:
            tree = psutil.Process(self.process.pid)
        except psutil.NoSuchProcess:
            return
        for one in (*tree.children(recursive=True), tree):
            one.kill()

    def get_weight_version(self) -> str:
        return str(self.get("get_weight_version")["weight_version"])

    def release_memory_occupation(self) -> Any:
        self.flush_cache()
        return self._make_request("release_memory_occupation")

    def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        return self._make_request("resume_memory_occupation", {"tags": tags})

    def check_weights(self, action: str) -> Any:
        return self._make_request("weights_checker", {"action": action})

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> Any:
        body = {"model_path": model_path, "weight_version": weight_version}
        return self._make_request("update_weights_from_disk", body)

    def init_weights_update_group(self, **group: Any) -> Any:
        return self._make_request("init_weights_update_group", group)

    def destroy_weights_update_group(self, group_name: str) -> Any:
        return self._make_request("destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(self, **described: Any) -> Any:
        described["dtypes"] = [str(one).replace("torch.", "") for one in described["dtypes"]]
        described["flush_cache"] = False
        return self._make_request("update_weights_from_distributed", described)

    def pause_generation(self) -> None:
        self._make_request("pause_generation")

    def continue_generation(self) -> None:
        self._make_request("continue_generation")


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the packages that they stand for."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "slime": {},
        "slime.backends": {},
        "slime.backends.sglang_utils": {},
        "slime.backends.sglang_utils.sglang_engine": {"SGLangEngine": SGLangEngine},
    }
    install_modules(monkeypatch, modules)
