"""The routes that steer the engine: pause, resume, new weights."""

from __future__ import annotations

from flask import Flask

from megatron_hybrid.server.serving import Serving


def install(app: Flask, serving: Serving) -> None:
    """POST /pause, /resume and /update_weights."""
