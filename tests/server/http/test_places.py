"""Which connections a worker has, and which make room for new ones; how long a body may take."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid.server.http.connection import Pace
from megatron_hybrid.server.processes.connections import Connection, Connections

LATER = 1.0  # seconds; more than a client needs for its first bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Clients:
    """Connections in a registry, over real sockets."""

    def __init__(self, clock: Clock, **changes: Any) -> None:
        limits = {"places": 4, "requests": 2, "an_address": 0, **changes}
        self.connections = Connections(
            **limits, header_seconds=20.0, idle_seconds=75.0, clock=clock
        )
        self.far_ends: dict[Connection, socket.socket] = {}

    def open(self, counted: str | None = None) -> Connection:
        near, far = socket.socketpair()
        connection = Connection(near, counted)
        self.far_ends[connection] = far
        self.connections.open(connection)
        return connection

    def is_open(self, connection: Connection) -> bool:
        far = self.far_ends[connection]
        try:
            return bool(far.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True

    def close(self) -> None:
        for connection, far in self.far_ends.items():
            connection.client.close()
            far.close()


@pytest.fixture
def clients(clock: Clock) -> Iterator[Clients]:
    clients = Clients(clock)
    yield clients
    clients.close()


def test_the_one_whose_headers_are_awaited_longest_makes_room(
    clients: Clients, clock: Clock
) -> None:
    first, *rest = [clients.open() for _ in range(4)]
    clock.now += LATER
    assert clients.connections.has_place()
    assert not clients.is_open(first)
    assert all(map(clients.is_open, rest))
    assert len(clients.connections) == 3
    clients.connections.close(first)  # its greenlet ends, too
    assert len(clients.connections) == 3


def test_who_waits_for_headers_goes_before_who_is_idle_and_nobody_whose_request_runs(
    clients: Clients, clock: Clock
) -> None:
    idle, busy, other = clients.open(), clients.open(), clients.open()
    for connection in (busy, other):
        assert clients.connections.begin(connection, brief=False)
    clients.connections.begin(idle, brief=False)
    clients.connections.end(idle)
    clock.now += LATER
    silent = clients.open()
    clock.now += LATER
    for expected in (silent, idle):
        assert clients.connections.has_place()
        assert not clients.is_open(expected)
        clients.open()
    assert clients.is_open(busy) and clients.is_open(other)


def test_a_new_connection_waits_when_the_others_are_as_new(clients: Clients, clock: Clock) -> None:
    opened = [clients.open() for _ in range(4)]
    assert not clients.connections.has_place()
    assert all(map(clients.is_open, opened))
    clock.now += LATER
    assert clients.connections.has_place()


def test_a_client_whose_bytes_this_worker_has_not_read_is_no_stalled_one(
    clients: Clients, clock: Clock
) -> None:
    opened = [clients.open() for _ in range(4)]
    clock.now += LATER
    clients.far_ends[opened[0]].send(b"GET")
    assert clients.connections.has_place()
    assert [clients.is_open(one) for one in opened] == [True, False, True, True]


def test_requests_leave_places_to_who_asks_how_the_server_is(
    clients: Clients, clock: Clock
) -> None:
    opened = [clients.open() for _ in range(4)]
    taken = [clients.connections.begin(one, brief=False) for one in opened[:3]]
    assert taken == [True, True, False]
    assert clients.connections.refused == 1
    assert clients.connections.begin(opened[3], brief=True)
    clock.now += LATER
    assert not clients.connections.has_place()  # both may still be read
    clock.now += 10.0
    assert clients.connections.has_place()
    assert not clients.is_open(opened[2])  # refused, and does not read its answer


def test_an_address_has_a_limit(clock: Clock) -> None:
    clients = Clients(clock, an_address=2, places=10)
    first, second, third = (clients.open("10.0.0.1") for _ in range(3))
    assert [one.is_refused for one in (first, second, third)] == [False, False, True]
    assert clients.connections.refused == 1
    assert not clients.open("10.0.0.2").is_refused
    assert not any(clients.open(None).is_refused for _ in range(4))
    for connection in (first, third):
        clients.connections.close(connection)
    assert not clients.open("10.0.0.1").is_refused
    clients.close()


def test_waiting_for_headers_and_between_requests_has_a_limit_in_time(
    clients: Clients, clock: Clock
) -> None:
    new, idle, begun, busy = (clients.open() for _ in range(4))
    for connection in (idle, begun, busy):
        clients.connections.begin(connection, brief=True)
    clients.connections.end(idle)
    clients.connections.end(begun)
    clock.now += 10.0
    clients.far_ends[begun].send(b"G")
    assert begun.recv(100) == b"G"  # from here on its headers are awaited
    clock.now += 10.5
    clients.connections.close_overdue()
    assert [clients.is_open(one) for one in (new, idle, begun, busy)] == [False, True, True, True]
    clock.now += 10.0
    clients.connections.close_overdue()
    assert [clients.is_open(one) for one in (idle, begun, busy)] == [True, False, True]
    clock.now += 45.0
    clients.connections.close_overdue()
    assert [clients.is_open(one) for one in (idle, busy)] == [False, True]


def test_at_the_end_only_those_that_wait_are_closed(clients: Clients) -> None:
    new, idle, busy, brief = (clients.open() for _ in range(4))
    for connection in (idle, busy):
        clients.connections.begin(connection, brief=False)
    clients.connections.begin(brief, brief=True)
    clients.connections.end(idle)
    clients.connections.close_waiting()
    opened = [clients.is_open(one) for one in (new, idle, busy, brief)]
    assert opened == [False, False, True, True]


def pace(clock: Clock) -> Pace:
    return Pace(patience=120.0, seconds=30.0, bytes_a_second=2**14, clock=clock)


def receive(pace: Pace, clock: Clock, pieces: int, size: int, seconds: float) -> None:
    """So many pieces, each that long after the one before; TimeoutError if that is too slow."""
    for _ in range(pieces):
        if pace.seconds_left() < seconds:
            raise TimeoutError
        clock.now += seconds
        pace.received += size


def test_one_byte_now_and_then_holds_no_place(clock: Clock) -> None:
    slow = pace(clock)
    with pytest.raises(TimeoutError):
        receive(slow, clock, 100, 1, 2.0)
    assert clock.now == 130.0
    assert "too slowly: 15 bytes in 30 seconds" in slow.complaint()


def test_a_slow_line_may_send_64_mib(clock: Clock) -> None:
    receive(pace(clock), clock, 1024, 2**16, 3.9)
    assert clock.now > 4000


def test_a_pause_in_a_body_that_came_fast_is_forgiven_for_two_minutes(clock: Clock) -> None:
    fast = pace(clock)
    receive(fast, clock, 100, 2**16, 0.1)
    assert fast.seconds_left() == 120.0
    assert fast.complaint() == "Nothing more of the body came for 120 seconds."


def test_a_connection_waits_as_long_as_its_body_may_take() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(7.0)
        connection = Connection(near, None)
        connection.pace = Pace(patience=1.0, seconds=0.01, bytes_a_second=1e9)
        far.send(b"abc")
        assert connection.recv(100) == b"abc"
        assert connection.pace.received == 3
        with pytest.raises(TimeoutError):
            connection.recv(100)
        assert near.gettimeout() == 7.0
