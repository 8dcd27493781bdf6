"""A server that a proxy shows under a path of its own (--root-path), whether or not the proxy takes
that path off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]


def without_root(path: str, root: str) -> str:
    """The path of a route, of a request's; "" for the root itself, without a slash after it."""
    if root and (path == root or path.startswith(root + "/")):
        return path.removeprefix(root)
    return path


def behind_root(application: Application, root: str) -> Application:
    """Takes the root off, and says to the application where it is."""

    def answer(environ: Environ, start: Start) -> Iterable[bytes]:
        path = without_root(environ["PATH_INFO"], root)
        if not path:  # the page's own addresses are relative to the slash
            start("308 Permanent Redirect", [("Location", f"{root}/"), ("Content-Length", "0")])
            return []
        return application({**environ, "SCRIPT_NAME": root, "PATH_INFO": path}, start)

    return answer
