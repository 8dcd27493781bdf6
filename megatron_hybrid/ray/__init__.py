"""Ray Serve with our engine: `serve run megatron_hybrid.ray:build` (docs/ray.md)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from megatron_hybrid.errors import ConfigurationError

MISSING = "Ray Serve is not installed: `pip install 'megatron-hybrid[ray]'`."


def build(args: dict[str, Any]) -> Any:
    """The application that these arguments describe: the flags of `serve`, and Ray's own ones.

    Raises ConfigurationError, before anything is started, for what can't be.
    """
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise ConfigurationError(MISSING)
    from megatron_hybrid.ray.application import application

    return application(args)
