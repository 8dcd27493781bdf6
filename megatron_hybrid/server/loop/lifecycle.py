"""The first rank's process from start to end: loading, serving, draining, what signals do."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.processes.launch import FrontEnd

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_loading_on_signals(front_end: FrontEnd) -> None:
    """Until `serve`, a signal ends the front end and this process, at once.

    A thread does it: the main thread may be in a long call that runs no signal handlers.
    """
    ours, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    for signum in ENDING_SIGNALS:
        signal.signal(signum, lambda signum, frame: None)
    signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        signum = ours.recv(1)
        if signum and signum[0] in ENDING_SIGNALS:
            front_end.leave()
            os._exit(128 + signum[0])

    threading.Thread(target=wait, name="signals", daemon=True).start()


def say_when_served(
    options: ServerOptions, replica: int, on_serving: Callable[[str], None] = lambda url: None
) -> Callable[[str], None]:
    """For EngineLoop's `on_join`: prints the address once every worker is served, and then calls
    `on_serving` with it."""
    joined = 0

    def on_join(url: str) -> None:
        nonlocal joined
        joined += 1
        if joined == options.http_workers:  # later ones replace workers that died
            size = options.data_parallel_size
            which = f" (replica {replica} of {size})" if size > 1 else ""
            print(f"serving {options.model_name} on {url}{which}", flush=True)
            on_serving(url)

    return on_join


def serve(
    loop: EngineLoop,
    front_end: FrontEnd,
    options: ServerOptions,
    *,
    when_all_live: Callable[[Callable[[], None]], None] = lambda action: action(),
) -> int:
    """Run the loop until it ends; the exit code.

    The first signal lets requests that are open finish, the second ends them. The front end ends
    with its last replica. When the engine fails, the front end stays, to say so and to wait for a
    restarted one. `when_all_live` calls what it is given if no rank has died: torchrun sends the
    same signal to those that are left of a group as to one that is to end.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        loop.request_stop()
        signal.signal(signum, signal.SIG_DFL)  # a third one ends a step that hangs

    def begin_to_drain() -> None:
        ends_too = front_end.begin_to_end()
        loop.request_drain(options.shutdown_timeout, apart=not ends_too)

    def drain(signum: int, frame: FrameType | None) -> None:
        for each in ENDING_SIGNALS:
            signal.signal(each, stop)
        when_all_live(begin_to_drain)

    wakeup = signal.set_wakeup_fd(-1)
    if wakeup >= 0:
        os.close(wakeup)  # which ends the thread that waits while the model loads
    for signum in ENDING_SIGNALS:
        signal.signal(signum, drain)
    front_end.engine_is_ready()
    try:
        exit_code = loop.run()
    except BaseException:
        front_end.abandon()
        raise
    if exit_code != 0:
        front_end.abandon()
    return exit_code
