"""What of Ray and of verl 0.9.1 examples/rl/verl_rollout.py needs, for machines that have neither:
actors are objects of this process, whose methods run on its event loop."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.doubled_modules import install_modules

NODE = "127.0.0.1"
ACTORS: dict[str, Any] = {}


class _Method:
    def __init__(self, bound: Callable[..., Any]) -> None:
        self._bound = bound

    async def remote(self, *arguments: Any, **named: Any) -> Any:
        found = self._bound(*arguments, **named)
        return await found if inspect.isawaitable(found) else found


class Handle:
    """Of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.__ray_call__ = _Method(lambda function: function(actor))

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._actor, name))


class _ActorClass:
    def __init__(self, kind: type, name: str | None = None) -> None:
        self._kind, self._name = kind, name

    def options(self, name: str, **_: Any) -> _ActorClass:
        return _ActorClass(self._kind, name)

    def remote(self, *arguments: Any, **named: Any) -> Handle:
        handle = Handle(self._kind(*arguments, **named))
        if self._name is not None:
            ACTORS[self._name] = handle
        return handle


class RolloutMode(Enum):
    HYBRID, COLOCATED, STANDALONE = "hybrid", "colocated", "standalone"


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """The fields that are read, with verl's defaults."""

    name: str
    repetition_penalty: float = 1.0
    seed: int = 42
    prompt_length: int = 512
    response_length: int = 512
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    ignore_eos: bool = False
    enforce_eager: bool = False
    free_cache_engine: bool = True
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    tensor_model_parallel_size: int = 2
    pipeline_model_parallel_size: int = 1
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    enable_prefix_caching: bool = True
    load_format: str = "dummy"
    quantization: str | None = None
    enable_rollout_routing_replay: bool = False


@dataclass
class HFModelConfig:
    path: str

    @property
    def local_path(self) -> str:
        return self.path


class BaseRollout(ABC):
    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    @abstractmethod
    async def resume(self, tags: list[str]) -> None: ...

    @abstractmethod
    async def update_weights(self, weights: Any, wire_format: str, **more: Any) -> None: ...

    @abstractmethod
    async def release(self) -> None: ...


class RolloutReplica(ABC):
    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.world_size = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
        self.gpus_per_node = gpus_per_node
        self.nnodes = max(1, self.world_size // gpus_per_node)
        self.is_reward_model, self.is_teacher_model = is_reward_model, is_teacher_model
        self.name_suffix = name_suffix
        self.max_concurrency = 1000
        self.workers: list[Any] = []
        self.servers: list[Any] = []

    @abstractmethod
    async def launch_servers(self) -> None: ...

    @property
    def server_handle(self) -> Any:
        return self._server_handle  # type: ignore[attr-defined]

    async def _all(self, method: str, **named: Any) -> None:
        await asyncio.gather(*[getattr(one, method).remote(**named) for one in self.servers])

    async def wake_up(self) -> None:
        await self._all("wake_up")

    async def sleep(self) -> None:
        await self._all("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._all("abort_all_requests", reject_request=reject_request)

    async def resume_generation(self) -> None:
        await self._all("resume_generation")

    async def clear_kv_cache(self) -> None:
        await self._all("clear_kv_cache")

    async def release_kv_cache(self) -> None:
        await self._all("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._all("resume_kv_cache")


class RolloutReplicaRegistry:
    loaders: dict[str, Callable[[], type[RolloutReplica]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        cls.loaders[name] = loader

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        return cls.loaders[name]()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the packages that they stand for."""
    context = SimpleNamespace(get_node_id=lambda: "node", get_accelerator_ids=lambda: {"GPU": []})
    strategy = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    modules: dict[str, dict[str, Any]] = {
        "ray": {
            "remote": _ActorClass,
            "get_actor": ACTORS.__getitem__,
            "get_runtime_context": lambda: context,
        },
        "ray.util": {"get_node_ip_address": lambda: NODE},
        "ray.util.scheduling_strategies": vars(strategy),
        "verl": {},
        "verl.utils": {},
        "verl.utils.config": {"omega_conf_to_dataclass": lambda one, dataclass_type=None: one},
        "verl.workers": {},
        "verl.workers.config": {"HFModelConfig": HFModelConfig, "RolloutConfig": RolloutConfig},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": {}},
        "verl.workers.rollout.replica": {
            "RolloutMode": RolloutMode,
            "RolloutReplica": RolloutReplica,
            "RolloutReplicaRegistry": RolloutReplicaRegistry,
            "TokenOutput": TokenOutput,
        },
    }
    install_modules(monkeypatch, modules)
