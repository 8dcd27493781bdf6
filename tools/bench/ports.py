"""Ports for servers that are started later."""

from __future__ import annotations

from megatron_hybrid.ray.ports import free_port

__all__ = ["free_address", "free_port"]


def free_address() -> str:
    """HOST:PORT of this machine that nobody has now."""
    return f"127.0.0.1:{free_port()}"
