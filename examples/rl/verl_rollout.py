"""verl's rollouts by our server: a replica, its server actor, and what the trainer's ranks call.

    export PYTHONPATH=DIR/examples/rl VERL_USE_EXTERNAL_MODULES=verl_rollout  # on every node
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=megatron_hybrid ...

Written for verl 0.9.1. Flags of ours go into `rollout.engine_kwargs.megatron_hybrid`, by their
names with underscores. Weights come by CUDA IPC, without a GPU over gloo. A replica is on one node;
more throughput is more replicas.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rollout_server import RolloutServer, ServerError, post
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)
from verl_words import NAME, generate_body, output_of, ranks_of, server_flags, version_of

from megatron_hybrid.ray.ports import free_port
from megatron_hybrid.training.weight_sender import WeightSender

logger = logging.getLogger(__name__)

ALL = ["weights", "kv_cache"]

Weights = Iterator[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]


class Server:
    """The actor beside a replica's GPUs: our server as its child, and `generate`."""

    def __init__(
        self, config: RolloutConfig, model: HFModelConfig, mode: RolloutMode, rank: int, gpus: str
    ) -> None:
        """rank: the replica's; gpus: its own, "" for none."""
        self._config: RolloutConfig = omega_conf_to_dataclass(config)
        self._model = omega_conf_to_dataclass(model, dataclass_type=HFModelConfig)
        self._mode, self._rank, self._gpus = mode, rank, gpus
        self._address = (ray.util.get_node_ip_address().strip("[]"), free_port())
        self._rejects = False
        self._open = 0  # requests that the server has
        self._layers = 0
        if self._config.enable_rollout_routing_replay:
            self._layers = self._model.hf_config.get_text_config().num_hidden_layers

    async def launch_server(self) -> None:
        """Until it generates. Raises ServerError."""
        flags = server_flags(self._config, self._model.local_path, self._rank, bool(self._gpus))
        self._server = RolloutServer(*self._address, flags, self._gpus)
        await asyncio.to_thread(self._server.wait_until_up, 1800.0)
        # As many as there are: verl bounds them, and answers take as long as they take.
        self._session = aiohttp.ClientSession(
            self._server.url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    def get_server_address(self) -> tuple[str, int]:
        """Host and port."""
        return self._address

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
    ) -> TokenOutput:
        """The answer; if it is aborted, what there is of it. Raises ServerError for what the server
        refuses."""
        if image_data or video_data or audio_data:
            raise ServerError("The server takes text alone, and the prompt has other data.")
        if self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        body = generate_body(self._config, prompt_ids, sampling_params, request_id)
        self._open += 1
        try:
            async with self._session.post("/generate", json=body) as answer:
                if answer.status != 200:
                    said = await answer.text()
                    raise ServerError(f"/generate was answered {answer.status}: {said}")
                return TokenOutput(**output_of(await answer.json(), self._layers))
        finally:
            self._open -= 1

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Answers end with what they have. Requests that come wait for `resume_generation`, or
        are answered with nothing at once."""
        self._rejects = reject_request
        await self._ask("/pause_generation", mode="abort")
        while reject_request and self._open:  # those that were on their way
            await self._ask("/abort_request", abort_all=True)
            await asyncio.sleep(0.05)

    async def resume_generation(self) -> None:
        """Go on."""
        self._rejects = False
        await self._ask("/continue_generation")

    async def sleep(self) -> None:
        """Give the memory to the trainer. Where it brings new weights these are given up; a
        standalone server keeps its own in place."""
        if self._config.free_cache_engine:
            await self._ask(
                "/release_memory_occupation",
                tags=["kv_cache"] if self._mode == RolloutMode.STANDALONE else ALL,
                keep_weights=self._mode != RolloutMode.HYBRID,
            )

    async def wake_up(self) -> None:
        """Take it back; what is awake stays so."""
        if self._config.free_cache_engine:
            await self._ask("/resume_memory_occupation", tags=ALL)

    async def release_kv_cache(self) -> None:
        """Its memory alone."""
        if self._config.free_cache_engine:
            await self._ask("/release_memory_occupation", tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Its memory alone."""
        if self._config.free_cache_engine:
            await self._ask("/resume_memory_occupation", tags=["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Forget every prefix. After new weights nothing old is found in any case."""
        await self._ask("/reset_prefix_cache")

    async def shutdown(self) -> None:
        """End the server."""
        await self._session.close()
        await asyncio.to_thread(self._server.end)

    async def _ask(self, path: str, **body: Any) -> None:
        await asyncio.to_thread(post, self._server.url, path, body)


class Replica(RolloutReplica):
    """Starts the actor on the node of its GPUs."""

    async def launch_servers(self) -> None:
        """One, with all GPUs of the replica."""
        if self.nnodes > 1:
            raise NotImplementedError(
                f"A replica of {self.world_size} GPUs is on {self.nnodes} nodes of "
                f"{self.gpus_per_node}; {NAME} starts it on one: choose smaller parallel sizes."
            )
        where = await asyncio.gather(*[one.__ray_call__.remote(_place) for one in self.workers])
        kind = "_reward" * self.is_reward_model + "_teacher" * self.is_teacher_model
        actor = ray.remote(Server).options(
            name=actor_name(self.replica_rank, kind + self.name_suffix),
            scheduling_strategy=NodeAffinitySchedulingStrategy(where[0][0], soft=False),
            max_concurrency=self.max_concurrency,
        )
        gpus = ",".join(gpu for _, each in where for gpu in each)
        server = actor.remote(
            self.config, self.model_config, self.rollout_mode, self.replica_rank, gpus
        )
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ServerAdapter(BaseRollout):
    """In each of the trainer's ranks, and in those beside a standalone server: sends weights to the
    replica that has this rank's GPU. The first rank of a replica asks its server."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: Any,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, self._size = int(os.environ["RANK"]), ranks_of(self.config)
        self.replica_rank = rank // self._size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % self._size == 0
        self._sender: WeightSender | None = None

    async def resume(self, tags: list[str]) -> None:
        """Wake up "weights" or "kv_cache"."""
        await self._ask("/resume_memory_occupation", tags=tags)

    async def release(self) -> None:
        """All memory goes to the trainer, which will bring new weights."""
        await self._ask("/release_memory_occupation", tags=ALL)

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """All of them, as one update; every rank has to draw them. Raises SendError."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"Weights as {wire_format!r} are not supported by {NAME}.")
        if peft_config:
            raise NotImplementedError(
                f"{NAME} takes whole weights here: set actor_rollout_ref.model.lora.merge=True."
            )
        if self._sender is None:
            self._sender = await self._connect()
        version = None if global_steps is None else version_of(global_steps)
        drawn = drawn_in(asyncio.get_running_loop(), weights)
        await asyncio.to_thread(self._sender.send, drawn, version)

    async def _connect(self) -> WeightSender:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        peers = None
        if self._size > 1:
            peers, _ = dist.new_subgroups(self._size, backend="gloo")
        url = await self._url() if self.is_leader_rank else ""
        host = ray.util.get_node_ip_address().strip("[]")
        return await asyncio.to_thread(
            lambda: WeightSender(
                [url], device, ranks_of_each=self._size, host=host, peers=peers, seconds=1800.0
            )
        )

    async def _url(self) -> str:
        server = ray.get_actor(actor_name(self.replica_rank))
        host, port = await server.get_server_address.remote()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _ask(self, path: str, **body: Any) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await asyncio.to_thread(post, await self._url(), path, body)


def drawn_in(loop: asyncio.AbstractEventLoop, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """For another thread: what comes of them in the loop's own, where trainers gather them. A part
    of a larger buffer, which may be filled again, is copied."""

    async def following() -> tuple[str, Tensor] | None:
        if isinstance(weights, AsyncIterator):
            return await anext(weights, None)
        return next(weights, None)

    while (found := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        name, tensor = found
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        yield name, tensor.detach().clone() if is_part else tensor.detach()


def actor_name(replica: int, suffix: str = "") -> str:
    """By which the trainer's ranks find it."""
    return f"{NAME}_server_{replica}{suffix}"


def _place(worker: Any) -> tuple[str, list[str]]:
    """The node of a worker, and its GPUs."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])


def install() -> None:
    """Tell verl in this process."""
    _ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.ServerAdapter"
    RolloutReplicaRegistry.register(NAME, lambda: Replica)


install()
