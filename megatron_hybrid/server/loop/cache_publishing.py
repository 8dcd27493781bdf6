"""Publishing what an engine's prefix cache holds, from the engine process's first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_hybrid.kv_events import KVEventPublisher, KVEventsConfig
from megatron_hybrid.server.link.run_folder import RunFolder

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine


@contextmanager
def publishing(
    engine: DynamicInferenceEngine,
    config: KVEventsConfig,
    folder: RunFolder,
    replica: int,
    num_replicas: int,
) -> Iterator[Callable[[], None]]:
    """One replica's events: for the coordinator of several replicas, in the server's own folder,
    and for a router outside, where --kv-events-config says; without either nothing is done.

    Gives what sends the changes since its last call, and never waits. What is left is sent at the
    end.
    """
    endpoints, replays = [], []
    if num_replicas > 1:
        endpoints.append(folder.kv_events_endpoint(replica))
        replays.append(folder.kv_replay_endpoint(replica))
    if config.enabled:
        endpoints.append(config.endpoint_of(replica))
        if (replay := config.replay_endpoint_of(replica)) is not None:
            replays.append(replay)
    if not endpoints:
        yield lambda: None
        return
    publisher = KVEventPublisher(endpoints, replays, config, replica=replica)
    changes = engine.cache_changes()

    def publish() -> None:
        publisher.publish(changes.take())

    publish()
    try:
        yield publish
    finally:
        publisher.close()
