"""What a web page may do here: Host, Origin, and CORS for the origins that the operator names.

A browser sends requests to any address for any page, also to a server that listens on this machine
alone. `Origin` says which page asks (always, unless it only reads), and `Host` by which name it
knows us: a page of evil.example whose name comes to point here is of our own origin to its browser,
and only the name gives it away.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from flask import Request, Response
from werkzeug.exceptions import Forbidden

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.options import ServerOptions, is_loopback

ANY_ORIGIN = "*"
PREFLIGHT_SECONDS = 600
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
EXPOSED_HEADERS = "Retry-After, WWW-Authenticate, X-Request-Id, Request-Id, X-System-Fingerprint"
_PORTS = {"http": "80", "https": "443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@*\s\\]+)")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/?#@\s\\,]+)(?::([0-9]{0,5}))?")
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


class BrowserRules:
    """The rules of one server. address: that it listens on."""

    def __init__(self, options: ServerOptions, address: str) -> None:
        self._origins = frozenset(options.allowed_origins)
        self._checks_host = is_loopback(address) or bool(options.allowed_hosts)
        self._takes_addresses = not is_loopback(address)
        self._hosts = {"localhost", options.host.lower(), *options.allowed_hosts}

    def check(self, request: Request) -> Response | None:
        """The answer to a preflight; None for another request that may go on. Raises Forbidden."""
        self._check_host(request)
        origin = request.headers.get("Origin")
        asked = request.headers.get("Access-Control-Request-Method")
        is_preflight = request.method == "OPTIONS" and origin is not None and asked is not None
        if origin is None or (request.method in SAFE_METHODS and not is_preflight):
            return None
        if not (self._allows(origin) or _is_own(origin, request)):
            raise Forbidden(
                f"The page that asks is of {origin[:200]}, which is not this server's own origin "
                "and not in --allowed-origins."
            )
        return self._preflight(request) if is_preflight else None

    def add_headers(self, request: Request, response: Response) -> Response:
        """Let an allowed page read the answer, errors included."""
        if self._origins:
            response.vary.add("Origin")
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
        return response

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("Host")
        # No browser leaves it out; some load balancers' health checks do.
        if host is None or not self._checks_host or self._knows(host):
            return
        raise Forbidden(
            f"The Host header is {host[:200]}, which is no name of this server; --allowed-hosts "
            "takes the names by which a proxy, or anybody else, may ask."
        )

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found[1].strip("[]")
        if name in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # No page of another site has an address of ours for its name.
        return address.is_loopback or self._takes_addresses

    def _allows(self, origin: str) -> bool:
        return origin in self._origins or ANY_ORIGIN in self._origins

    def _preflight(self, request: Request) -> Response:
        response = Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
        # Whatever it asks for: OpenAI's clients add headers of their own with every version.
        if names := request.headers.get("Access-Control-Request-Headers"):
            response.headers["Access-Control-Allow-Headers"] = names
            response.vary.add("Access-Control-Request-Headers")
        response.headers["Access-Control-Max-Age"] = str(PREFLIGHT_SECONDS)
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response


def _is_own(origin: str, request: Request) -> bool:
    """Whether the origin is the request's own address. Without TLS here, a proxy before us may have
    it: then the page of https://host is as much ours as that of http://host."""
    found = _ORIGIN.fullmatch(origin)
    if found is None or found[1] not in (("https",) if request.is_secure else ("http", "https")):
        return False
    ours = _with_port(request.headers.get("Host", ""), found[1])
    return ours is not None and ours == _with_port(found[2], found[1])


def _with_port(host: str, scheme: str) -> tuple[str, str] | None:
    found = _HOST.fullmatch(host.lower())
    return None if found is None else (found[1], found[2] or _PORTS[scheme])


def parse_origins(given: Sequence[str]) -> tuple[str, ...]:
    """--allowed-origins as browsers write them; ConfigurationError for what is none."""
    return tuple(dict.fromkeys(map(_origin, given)))


def _origin(text: str) -> str:
    if text == ANY_ORIGIN:
        return text
    found = _ORIGIN.fullmatch(text.lower().removesuffix("/"))
    if found is None:
        raise ConfigurationError(
            f"--allowed-origins takes origins as browsers send them, such as https://chat.example "
            f"or http://localhost:3000, or * for all; not {text!r}."
        )
    scheme, host = found.groups()
    return f"{scheme}://{host.removesuffix(':' + _PORTS.get(scheme, '-'))}"


def parse_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """--allowed-hosts; ConfigurationError for what is no name or address."""
    return tuple(dict.fromkeys(map(_host, given)))


def _host(text: str) -> str:
    name = text.lower().strip("[]")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if _HOST_NAME.fullmatch(name) and not name.isdigit():
            return name
    raise ConfigurationError(
        f"--allowed-hosts takes names and addresses without a port, such as llm.example; "
        f"not {text!r}."
    )
