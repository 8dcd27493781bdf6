"""A front end's link to its engine."""

from __future__ import annotations

import pytest
import zmq

from tests.server.conftest import RunningLoop


def test_signals_while_it_begins_or_ends_to_look_at_a_connection_do_not_end_it(
    running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly, calls = zmq.Socket.monitor, 0

    def interrupted(socket: zmq.Socket[bytes], address: str | None, events: int) -> None:
        """At each first try."""
        nonlocal calls
        calls += 1
        if calls % 2:
            raise zmq.error.InterruptedSystemCall
        plainly(socket, address, events)

    monkeypatch.setattr(zmq.Socket, "monitor", interrupted)
    (client,) = running.connect().clients  # which waits until it is ready
    client.close()
    assert calls == 4
