"""Publishing what an engine's prefix cache holds, from the engine process's first rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hybrid.kv_events import KVEventPublisher, KVEventRecorder, KVEventsConfig
from megatron_hybrid.server.link.run_folder import RunFolder

if TYPE_CHECKING:  # torch takes seconds, during which the front end already starts
    from megatron_hybrid.engine.engine import DynamicInferenceEngine


class CachePublishing:
    """One replica's events: for the coordinator of several replicas, in the server's own folder,
    and for a router outside, where --kv-events-config says. Without either it does nothing."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        config: KVEventsConfig,
        folder: RunFolder,
        *,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self._publisher: KVEventPublisher | None = None
        endpoints, replays = [], []
        if num_replicas > 1:
            endpoints.append(folder.kv_events_endpoint(replica))
            replays.append(folder.kv_replay_endpoint(replica))
        if config.enabled:
            endpoints.append(config.endpoint_of(replica))
            if (replay := config.replay_endpoint_of(replica)) is not None:
                replays.append(replay)
        if not endpoints:
            return
        self._publisher = KVEventPublisher(
            endpoints,
            replays,
            topic=config.topic,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            replica=replica,
        )
        self._recorder = KVEventRecorder(engine.cache_geometry, engine.epoch)
        engine.listen_to_cache(self._recorder)
        self.publish()

    def publish(self) -> None:
        """Send what has changed since the last call. Never waits."""
        if self._publisher is not None:
            self._publisher.publish(self._recorder.take())

    def close(self) -> None:
        """Send what is left."""
        if self._publisher is not None:
            self._publisher.close()
