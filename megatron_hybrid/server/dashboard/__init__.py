"""The page at /: a chat and a live picture of the cache."""

from __future__ import annotations

from flask import Flask

from megatron_hybrid.server.serving import Serving


def install(app: Flask, serving: Serving) -> None:
    """GET / and the files of the page."""
