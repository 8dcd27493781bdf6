"""The engine as Dynamo's worker drives it: dynamo.common.backend's LLMEngine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown
from prometheus_client import CollectorRegistry

from megatron_hybrid.dynamo.answers import Answer
from megatron_hybrid.dynamo.arguments import WorkerSettings, parse
from megatron_hybrid.dynamo.process import EngineProcess
from megatron_hybrid.dynamo.stream import EventStream, Handover
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.pause_mode import PAUSE_MODES, PauseMode
from megatron_hybrid.request import FinishReason, RequestEvent
from megatron_hybrid.server.http.metrics import ServerMetrics
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import EngineClient, QueryFailed
from megatron_hybrid.server.link.subscription import EngineUnavailable, Overloaded
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.weight_transfer.requests import FromFolder

START_POLL_SECONDS = 0.2
DRAIN_POLL_SECONDS = 0.05
SNAPSHOT_SECONDS = 1.0
DP_RANK = 0  # a worker is one replica
# Dynamo's POST /engine/control/NAME and /engine/update/NAME: the query, and its arguments' names.
Routes = dict[str, tuple[type[wire.Query], tuple[str, ...]]]
CONTROLS: Routes = {
    "pause": (wire.Pause, ("mode",)),
    "resume": (wire.Resume, ()),
    "reset_prefix_cache": (wire.ResetPrefixCache, ()),
}
MODES = {  # by our --role
    "both": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}
UPDATES: Routes = {"weights": (wire.UpdateWeights, ("folder", "mode"))}

logger = logging.getLogger(__name__)


class MegatronEngine(LLMEngine):
    """One replica of a model: its engine process, and a client of that.

    exit_code: what this process is to end with; not 0 when the engine has failed.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: EngineProcess | None = None
        self._engine: ReplicaSet | None = None
        self._handover: Handover | None = None
        self._handover_address = ""  # of what a prefill worker computes; Handover is of events
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._open: dict[str, str] = {}  # by Dynamo's id of a request, ours
        self._publisher: Any = None  # of snapshots
        self._ends = False
        self.exit_code = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[MegatronEngine, WorkerConfig]:
        """The engine that these flags describe, and what Dynamo has to know. Raises
        ConfigurationError."""
        return cls.with_config(parse(argv))

    @classmethod
    def with_config(cls, settings: WorkerSettings) -> tuple[MegatronEngine, WorkerConfig]:
        """The same, of flags that were read."""
        config = WorkerConfig.from_runtime_config(
            settings.runtime,
            model_name=settings.folder,
            served_model_name=settings.names[0],
            disaggregation_mode=MODES[settings.config.role],
        )
        return cls(settings), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the engine and wait until it is ready; what the front end has to know of it."""
        config = self._settings.config
        loop = asyncio.get_running_loop()
        self._handover = Handover(loop)
        self._process = process = await asyncio.to_thread(
            EngineProcess, config, self._settings.options.inference_rank_timeout
        )
        self._engine = ReplicaSet([process.endpoint])
        self._engine.join("")
        client = self._client()
        ready = await self._ready(client, process)
        self._handover_address = ready.handover_address
        figures = await asyncio.wrap_future(client.begin(wire.GetStats))
        self._tasks = [
            loop.create_task(self._watch(process)),
            loop.create_task(self._publish_snapshots(client)),
        ]
        return EngineConfig(
            model=self._settings.folder,
            served_model_name=self._settings.names[0],
            model_aliases=list(self._settings.names[1:]),
            llm=LlmRegistration(
                context_length=ready.max_seq_length,
                kv_cache_block_size=ready.cache.block_size,
                total_kv_blocks=figures["kv_blocks"],
                max_num_seqs=config.inference_dynamic_batching_max_requests,
                max_num_batched_tokens=config.inference_dynamic_batching_max_tokens,
            ),
        )

    async def _ready(self, client: EngineClient, process: EngineProcess) -> wire.EngineReady:
        while client.ready is None:
            if (code := process.exit_code) is not None:
                self.exit_code = code if code > 0 else 1
                raise EngineShutdown(
                    f"The engine process ended with exit code {code} while it started; its last "
                    "line says why."
                )
            await asyncio.sleep(START_POLL_SECONDS)
        return client.ready

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk for each event of the engine; the request is ended there if nobody reads on."""
        client, answer = self._client(), Answer(self._handover_address)
        name = f"{context.id()}-{next(self._numbers)}"
        assert self._handover is not None, "start comes first"
        stream = EventStream(self._handover)
        try:
            client.submit(
                self._settings.reader.read(
                    request, name, arrived=time.monotonic(), probe=is_probe(request)
                ),
                stream,
            )
            self._open[context.id()] = name
            while not answer.has_ended:
                event = await stream.next()
                if event.finish_reason is FinishReason.ERROR:
                    raise _failure(event)
                if event.has_news:
                    yield answer.chunk(event)  # Dynamo takes a prefill worker's first one alone
        except InvalidRequestError as error:
            raise InvalidArgument(str(error)) from error
        except (EngineUnavailable, Overloaded) as error:
            raise EngineShutdown(str(error)) from error
        finally:
            self._open.pop(context.id(), None)
            if not answer.has_ended:
                client.forget(name, 0)
                client.send(wire.AbortRequest(name))

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone."""
        if (name := self._open.get(context.id())) is not None:
            self._client().send(wire.AbortRequest(name))

    async def is_quiescent(self) -> bool:
        """Whether no request is here."""
        return self._engine is None or self._engine.running() == 0

    async def cleanup(self) -> None:
        """End the engine process, when its requests have ended or their time is over."""
        self._ends = True
        late = time.monotonic() + self._settings.options.shutdown_timeout
        while not await self.is_quiescent() and time.monotonic() < late:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        self._process = self._engine = None

    async def kv_event_sources(self) -> list[KvEventSource]:
        """What the prefix cache holds, for the router; nothing without one."""
        config = self._settings.config
        if self._process is None or not config.inference_dynamic_batching_prefix_caching:
            return []
        return [ZmqSource(self._process.kv_events_endpoint, dp_rank=DP_RANK)]

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token, which shows that the engine makes some."""
        ends = self._client().check().eos_token_ids
        payload: dict[str, Any] = build_health_check_payload(ends[0] if ends else 0)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """The figures of docs/server_metrics.md, on the page of Dynamo's system port."""
        registry = CollectorRegistry()
        assert self._engine is not None, "start comes first"
        registry.register(ServerMetrics(self._engine))
        register_engine_registry(metrics, registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        """Whose snapshots come."""
        return [DP_RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Where they go."""
        self._publisher = publisher

    def supported_controls(self) -> set[str]:
        """What `engine_control` does."""
        return set(CONTROLS)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Our server's route of this name."""
        return await self._ask(*CONTROLS[control], body)

    def supported_updates(self) -> set[str]:
        """What `engine_update` does."""
        return set(UPDATES)

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """New weights from a folder, as our server's /update_weights."""
        return await self._ask(*UPDATES[update], body)

    async def _ask(
        self, kind: type[wire.Query], names: tuple[str, ...], body: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer to a query with these arguments, which the body has."""
        body = {"mode": PauseMode.FINISH.value, **body}
        if body["mode"] not in PAUSE_MODES:
            return _error(f"mode is {body['mode']!r}; it must be one of {', '.join(PAUSE_MODES)}.")
        if not all(isinstance(body.get(name), str) for name in names):
            return _error(f"The body must have text for each of {', '.join(names)}.")
        try:
            given = (FromFolder(body[n]) if n == "folder" else body[n] for n in names)
            asked = self._client().begin(kind, *given)
            values: dict[str, Any] = await asyncio.wrap_future(asked)
        except (EngineUnavailable, QueryFailed) as error:
            return _error(str(error))
        return {"status": "ok", **values}

    def _client(self) -> EngineClient:
        if self._engine is None:
            raise EngineShutdown("The worker is starting or ending.")
        return self._engine.clients[0]

    async def _publish_snapshots(self, client: EngineClient) -> None:
        """How full the engine is: for the router's thresholds, and Dynamo's own gauges."""
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            if self._publisher is None:
                continue
            with contextlib.suppress(EngineUnavailable):
                figures = await asyncio.wrap_future(client.begin(wire.GetStats))
                self._publisher.publish(DP_RANK, snapshot(figures))

    async def _watch(self, process: EngineProcess) -> None:
        """End the worker when its engine has died, for a supervisor to start both again."""
        code = await asyncio.to_thread(process.wait)
        if not self._ends:
            logger.error("The engine process ended with exit code %d; the worker ends, too.", code)
            self.exit_code = code if code > 0 else 1
            os.kill(os.getpid(), signal.SIGTERM)


def _error(message: str) -> dict[str, Any]:
    return {"status": "error", "message": message}


def _failure(event: RequestEvent) -> Exception:
    if event.error is not None and event.error_field is not None:
        return InvalidArgument(event.error)
    return Unknown(event.error or "The engine failed and did not say why.")


def snapshot(figures: dict[str, Any]) -> ComponentSnapshot:
    """Of the engine's figures; blocks that nobody uses are no load, since they can be evicted."""
    used, blocks = figures["kv_used"], figures["kv_blocks"]
    prompt = figures["prompt_tokens"]
    return ComponentSnapshot(
        kv_used_blocks=used,
        kv_total_blocks=blocks,
        gpu_cache_usage=used / blocks if blocks else 0.0,
        kv_cache_hit_rate=figures["skipped_tokens"] / prompt if prompt else None,
        dp_rank=DP_RANK,
    )
