"""Whose connection it is: addresses that are counted, and proxies that are believed."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ONE_CLIENT = 64  # bits of an IPv6 address; who has one address has all that begin so


class Addresses:
    """trusted_proxies: addresses and networks (10.0.0.0/8) of proxies that clients come through."""

    def __init__(self, trusted_proxies: Sequence[str]) -> None:
        self._trusted = [parse_network(text) for text in trusted_proxies]

    def counted(self, peer: str) -> str | None:
        """Under what a connection from there counts; None if it counts nowhere: one from this
        machine, or from a trusted proxy, which brings those of many clients."""
        address = _parse(peer)
        if address is None or address.is_loopback or self._trusts(address):
            return None
        if address.version == 4:
            return str(address)
        return str(ipaddress.ip_network((int(address), _ONE_CLIENT), strict=False))

    def client(self, peer: str, forwarded: str | None) -> str:
        """The client behind a connection. forwarded: its X-Forwarded-For, which is believed as far
        as trusted proxies have written it, from the end."""
        address = _parse(peer)
        names = (forwarded or "").split(",")
        while address is not None and self._trusts(address):
            peer = str(address)
            address = _parse(names.pop().strip()) if names else None
        return peer if address is None else str(address)

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def parse_network(text: str) -> Network:
    """An address or a network; ValueError for anything else."""
    return ipaddress.ip_network(text, strict=False)


def _parse(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)  # what IPv4 clients are to an IPv6 socket
    return address if mapped is None else mapped
