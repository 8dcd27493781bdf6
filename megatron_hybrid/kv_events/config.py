"""KVEventsConfig: the value of --kv-events-config, with vLLM's field names."""

from __future__ import annotations

from typing import Literal

import msgspec

from megatron_hybrid.errors import ConfigurationError


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where KV events go. Replica k of a launch adds k to the port of both tcp endpoints."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: zmq where events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that wait for a slow subscriber, before it loses some
    max_queue_size: int = 100_000  # accepted as vLLM does; our queue needs no bound
    topic: str = ""

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig:
        """Raises ConfigurationError for anything else than such an object."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"--kv-events-config {text!r} is not a JSON object of its fields "
                f"({', '.join(cls.__struct_fields__)}): {error}."
            ) from None
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(config, name)
            if value is not None and not value.startswith(("tcp://", "ipc://")):
                raise ConfigurationError(
                    f"--kv-events-config: {name} is {value!r}; it must begin with tcp:// or ipc://."
                )
        for name in ("buffer_steps", "hwm"):
            if (number := getattr(config, name)) < 1:
                raise ConfigurationError(
                    f"--kv-events-config: {name} is {number}; it must be at least 1."
                )
        return config

    @property
    def enabled(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoint_of(self, replica: int) -> str:
        """Where this replica publishes."""
        return _offset(self.endpoint, replica)

    def replay_endpoint_of(self, replica: int) -> str | None:
        """Where this replica is asked for what was missed; None: nowhere."""
        return None if self.replay_endpoint is None else _offset(self.replay_endpoint, replica)


def _offset(endpoint: str, replica: int) -> str:
    """As vLLM does for data-parallel ranks: the next ports. Of an ipc socket: the next names."""
    if replica == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{replica}"
    base, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigurationError(
            f"--kv-events-config: {endpoint!r} has no port number, and several replicas need one "
            "each."
        )
    return f"{base}:{int(port) + replica}"
