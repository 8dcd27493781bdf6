"""Whose connection it is."""

from __future__ import annotations

import pytest

from megatron_hybrid.server.addresses import Addresses

PROXIES = ("10.0.0.0/8", "192.168.1.4", "fd00::/8")


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("127.0.0.1", None),
        ("127.9.9.9", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("10.1.2.3", None),
        ("192.168.1.4", None),
        ("192.168.1.5", "192.168.1.5"),
        ("fd00::1", None),
        ("fe80::1%eth0", "fe80::/64"),
        ("", None),  # a socket of this machine
    ],
)
def test_what_a_connection_counts_under(peer: str, counted: str | None) -> None:
    assert Addresses(PROXIES).counted(peer) == counted


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.7", None, "203.0.113.7"),
        ("203.0.113.7", "1.2.3.4", "203.0.113.7"),  # anybody can write that
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", "9.9.9.9, 1.2.3.4", "1.2.3.4"),  # only the last was written by the proxy
        ("10.0.0.1", "9.9.9.9, 1.2.3.4, 10.0.0.2", "1.2.3.4"),
        ("10.0.0.1", "10.0.0.3,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("10.0.0.1", "1.2.3.4, evil\nline, 10.0.0.2", "10.0.0.2"),
        ("", "1.2.3.4", ""),
    ],
)
def test_the_client_is_whom_trusted_proxies_name(
    peer: str, forwarded: str | None, client: str
) -> None:
    assert Addresses(PROXIES).client(peer, forwarded) == client
