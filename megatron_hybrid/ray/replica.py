"""One replica of the model: Ray's actor around the first rank's server, and one for each other
rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_hybrid.ray.arguments import Application, options_of_server
from megatron_hybrid.ray.messages import MOST_BYTES, Asked, Head, Price, Whole
from megatron_hybrid.ray.ports import free_port
from megatron_hybrid.ray.pricing import Pricing
from megatron_hybrid.ray.process import FirstRank, RankProcess, rank_environment
from megatron_hybrid.ray.routes import has_prompt
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.subscription import EngineUnavailable
from megatron_hybrid.server.log_format import LOG_FORMATS, set_up_logging
from megatron_hybrid.server.replicas.replica_set import ReplicaSet

READY_SECONDS = 0.1
WATCH_SECONDS = 0.5
STATS_SECONDS = 5.0
LAST_WORDS_SECONDS = 1.0  # for the front end to say to its streams what became of the engine
CONNECT_SECONDS = 10.0
OTHER_RANKS_SECONDS = 5.0  # they end with the first one
# Of one connection, or the other side's to say.
NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length"}
RAYS_OWN = {"date", "server", "x-request-id"}  # its proxy says them; the last one is the same

logger = logging.getLogger(__name__)


class Place:
    """Where an actor is."""

    def where(self) -> tuple[str, list[str]]:
        """Its node, and the GPUs that Ray has set aside for it."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), list(map(str, gpus))


class Rank(Place):
    """Another rank than the first one."""

    def __init__(self) -> None:
        self._process: RankProcess | None = None

    def run(self, flags: Sequence[str], environment: dict[str, str]) -> str:
        """Until it ends; what it said last."""
        self._process = RankProcess(flags, environment)
        code = self._process.wait()
        return f"exit code {code}: {self._process.last_words()}"


class Replica(Place):
    """Answers what is sent here, and says what a prompt would cost here."""

    def __init__(self, application: Application) -> None:
        set_up_logging(LOG_FORMATS[0], "replica", "%(asctime)s %(name)s: ", logging.WARNING)
        logging.getLogger("megatron_hybrid").setLevel(logging.INFO)
        self._application = application
        self.name = serve.get_replica_context().replica_id.unique_id
        self._ends = False
        self._session: aiohttp.ClientSession | None = None
        self._others: list[Any] = []
        self._runs: list[Any] = []  # what each of them says in the end
        options = options_of_server(application.flags)  # first: its sentences are the user's
        self._process = self._start_ranks()
        self._engine = ReplicaSet([self._process.folder.engine_endpoint(0)])
        self._engine.join("")
        self._pricing = Pricing(options, self._process.folder, self._wait_until_ready())
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _start_ranks(self) -> FirstRank:
        ranks = self._application.ranks
        group = ray.util.get_current_placement_group()
        for bundle in range(1, ranks):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            self._others.append(
                ray.remote(Rank)
                .options(
                    num_cpus=self._application.ray.cpus,
                    num_gpus=self._application.gpus,
                    scheduling_strategy=strategy,
                )
                .remote()
            )
        places = [self.where(), *ray.get([one.where.remote() for one in self._others])]
        address, port = ray.util.get_node_ip_address(), free_port()
        environments = []
        for rank, (node, _) in enumerate(places):
            local = [other for other, (there, _) in enumerate(places) if there == node]
            gpus = [gpu for other in local for gpu in places[other][1]]
            environments.append(rank_environment(rank, ranks, address, port, local, gpus))
        flags = self._application.flags
        self._runs = [
            one.run.remote(flags, environment)
            for one, environment in zip(self._others, environments[1:], strict=True)
        ]
        return FirstRank(flags, environments[0])

    def _wait_until_ready(self) -> wire.EngineReady:
        (client,) = self._engine.clients
        while client.ready is None:
            if (code := self._process.exit_code) is not None:
                said = self._process.last_words()
                self._process.folder.remove()
                raise RuntimeError(
                    f"The engine ended with exit code {code} while it started: {said}"
                )
            if (lost := self._lost_rank(READY_SECONDS)) is not None:
                self._process.end(0)
                raise RuntimeError(f"A rank ended while the replica started: {lost}")
        return client.ready

    def _watch(self) -> None:
        """End the actor when a rank has died, for Ray to start another replica."""
        while self._process.exit_code is None:
            lost = self._lost_rank(WATCH_SECONDS)
            if lost is not None and not self._ends:
                logger.error("A rank of the replica has ended: %s", lost)
                self._process.end(LAST_WORDS_SECONDS)  # its ranks have seen it, or never will
        if not self._ends:
            code = self._process.exit_code
            logger.error("The engine ended with exit code %d; the replica ends, too.", code)
            time.sleep(LAST_WORDS_SECONDS)
            self._process.folder.remove()
            os._exit(1)

    def _lost_rank(self, seconds: float) -> str | None:
        """What became of one of the other ranks, if that happens in so long."""
        if not self._runs:
            time.sleep(seconds)
            return None
        ended, _ = ray.wait(self._runs, timeout=seconds)
        if not ended:
            return None
        try:
            said: str = ray.get(ended[0])
        except ray.exceptions.RayError as error:
            return str(error)
        return said

    async def ask(self, asked: Asked) -> Price | None:
        """What the request would cost here; None where it can't be answered here."""
        return await asyncio.wrap_future(
            self._pricing.ask(asked.name, asked.route, asked.headers, asked.body)
        )

    async def forward(self, asked: Asked) -> AsyncGenerator[Head | bytes, None]:
        """The answer of our server: its head, and then the body as it comes. Broken off, the
        request is ended in the engine."""
        if has_prompt(asked):
            self._pricing.begin(asked.name)  # done before whatever is asked later
        try:
            async with self._request(asked) as answer:
                head = _head(answer)
                if not head.is_stream:
                    body = await answer.read()  # each item costs much more than its bytes
                    yield head._replace(body=body[:MOST_BYTES])
                    for start in range(MOST_BYTES, len(body), MOST_BYTES):
                        yield body[start : start + MOST_BYTES]
                    return
                yield head
                has_begun = False
                async for chunk in answer.content.iter_any():
                    if not has_begun:
                        self._pricing.start(asked.name)
                        has_begun = True
                    yield chunk
        except aiohttp.ClientError as error:
            # By gRPC it goes to the ingress as it is, and not each of these can be pickled.
            raise ConnectionError(f"The server does not answer: {error!r}") from None
        finally:
            self._pricing.end(asked.name)

    async def call(self, asked: Asked) -> Whole:
        """The same in one piece, of what every replica is asked."""
        async with self._request(asked) as answer:
            status, headers, _ = _head(answer)
            return Whole(self.name, status, headers, await answer.read())

    def _request(self, asked: Asked) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
                auto_decompress=False,
            )
        headers = {
            name: value for name, value in asked.headers.items() if name not in NOT_PASSED_ON
        }
        return self._session.request(
            asked.method,
            self._process.url + asked.path,
            headers=headers,
            data=asked.body or None,
            skip_auto_headers=("Content-Type", "User-Agent", "Accept", "Accept-Encoding"),
            allow_redirects=False,
        )

    async def check_health(self) -> None:
        """Asked by Ray now and then; a replica that raises is ended, and another one started."""
        (client,) = self._engine.clients
        if self._process.exit_code is not None:
            raise RuntimeError("The engine process has ended.")
        if client.is_stalled:
            raise RuntimeError("The engine has said nothing for too long.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The engine's own queue, for `scaling.wanted_replicas`."""
        (client,) = self._engine.clients
        with contextlib.suppress(EngineUnavailable, TimeoutError):
            asked = asyncio.wrap_future(client.begin(wire.GetStats))
            figures = await asyncio.wait_for(asked, STATS_SECONDS)
            running, waiting = figures["requests_running"], figures["requests_waiting"]
            return {"running": float(running), "waiting": float(waiting)}
        return {}

    def __del__(self) -> None:
        """Ray ends the replica, whose requests have ended."""
        self._ends = True
        with contextlib.suppress(AttributeError):  # it has never been up
            self._process.end(self._application.shutdown_timeout)
            self._pricing.close()
            self._engine.close()
            with contextlib.suppress(ray.exceptions.RayError, concurrent.futures.TimeoutError):
                ray.wait(self._runs, num_returns=len(self._runs), timeout=OTHER_RANKS_SECONDS)


def _head(answer: aiohttp.ClientResponse) -> Head:
    dropped = NOT_PASSED_ON | RAYS_OWN
    kept = [one for one in answer.headers.items() if one[0].lower() not in dropped]
    return Head(answer.status, kept)
