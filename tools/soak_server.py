#!/usr/bin/env python
r"""Holds many streams on a server for a long time, and checks every answer and its processes.

    python tools/soak_server.py --minutes 30                         the reference model
    python tools/soak_server.py --streams 500 --minutes 30 -- --load DIR
    python tools/soak_server.py --url http://127.0.0.1:5000 --pid PID
    python tools/soak_server.py --streams 200 --vanish           half of the clients hang up at once
    python tools/soak_server.py --replicas 2                     two replicas behind one address
    python tools/soak_server.py --streams 8 --worst-bodies       beside a client of the worst kind

What follows `--` goes to tools/run_text_generation_server.py. Every answer must be complete (status
200, usage, [DONE]) and the same as the first one to its prompt, since all are greedy. Memory is
that of each of the server's processes, every ten seconds; their sum's growth counts from --warm-up
on.
The front end's processor time is divided by the tokens that were sent. The exit code is 1 if an
answer was wrong or a limit was exceeded, and the last thing printed is JSON.

With --vanish every stream has a prompt of its own. When all of them run, half of their connections
are closed at once, and then the other half: how long until `/metrics` shows no row, KV block or
state slot in use but those of the streams that are left. The exit code is 1 if that took more than
--most-seconds.

With --worst-bodies a process beside the streams sends all of tools/worst_bodies.py again and again.
None may go without an answer, or get a status of 500 or more. Memory's growth is that of its
least, so --warm-up has to hold all bodies once (2.5 minutes). For each the report has the longest
gap between two pieces of any stream and the slowest answer of `/health` while it was under way; the
exit code is 1 if one of these took more than --most-gap. `client_lag` is how late this script was
itself, which counts in both: hold few streams where cores are few.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 10.0
HEALTH_SECONDS = 0.1  # from one question to the next
LAG_SECONDS = 0.01
# The longest prompt is among the bodies, and computed: in steps that a CPU does in 0.05 s.
STEPS_BESIDE_BODIES = ["--inference-dynamic-batching-max-tokens", "128"]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
VANISH_PROMPT_TOKENS = 640
VANISH_ANSWER_TOKENS = 250
VANISH_BLOCKS = 14  # of 64 tokens, the default, for all of these
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Progress:
    """What the streams have seen so far."""

    tokens: int = 0
    answers: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)  # by prompt

    def fail(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


@dataclass
class Waits:
    """The longest waits of the run, in seconds, and what was under way meanwhile."""

    gap: float = 0.0  # between two pieces of a stream
    first: float = 0.0  # until a stream's first piece
    health: float = 0.0
    client_lag: float = 0.0
    # With --worst-bodies, by name.
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: int = 0
    _begun: list[tuple[float, str]] = field(default_factory=list)  # when each was begun

    def begin(self, body: str) -> None:
        self._begun.append((time.monotonic(), body))

    def end(self, outcome: dict[str, Any]) -> None:
        self.sent += 1
        seen = self._of(outcome["name"])
        seen["bytes"], seen["status"] = outcome["bytes"], outcome["status"]
        seen["seconds"] = max(seen["seconds"], outcome["seconds"])

    def add_gap(self, start: float, end: float) -> None:
        self.gap = max(self.gap, end - start)
        self._add("gap", start, end)

    def add_health(self, start: float, end: float) -> None:
        self.health = max(self.health, end - start)
        self._add("health", start, end)

    def _add(self, what: str, start: float, end: float) -> None:
        """A wait is the fault of the body that was under way for most of it."""
        most, body, until = 0.0, None, end
        for begun, name in reversed(self._begun):
            if until - max(begun, start) > most:
                most, body = until - max(begun, start), name
            if begun <= start:
                break
            until = begun
        if body is not None:
            seen = self._of(body)
            seen[what] = max(seen[what], round(end - start, 3))

    def _of(self, body: str) -> dict[str, Any]:
        return self.bodies.setdefault(body, {"seconds": 0.0, "gap": 0.0, "health": 0.0})


class Server:
    """The server's processes: those below the ones with these ids, and these."""

    def __init__(self, url: str, *pids: int) -> None:
        self.url = url
        self.pids = pids

    def processes(self) -> dict[int, str]:
        """Process ids and command lines; a front end that left the group is its child still."""
        found, left = {}, list(self.pids)
        while left:
            pid = left.pop()
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                for task in Path(f"/proc/{pid}/task").iterdir():
                    left += map(int, (task / "children").read_text().split())
        return found

    def memory(self) -> list[int]:
        """Bytes in RAM of each of its processes; pages that they share count in each."""
        sizes = []
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                sizes.append(int(_read(pid, "statm").split()[1]) * _PAGE)
        return sizes

    def front_end_seconds(self) -> float:
        """Processor time, user and system, of the front end's processes so far."""
        return sum(
            sum(map(int, _read(pid, "stat").rpartition(")")[2].split()[11:13])) / _TICKS
            for pid, command in self.processes().items()
            if "megatron_hybrid.server.processes.front_end" in command
            or command.startswith("gunicorn: ")
        )


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def hold_stream(server: Server, args: argparse.Namespace, number: int, end: float) -> None:
    """Ask, read the answer to its end, and ask again, on one connection for as long as it lasts."""
    address = urlsplit(server.url)
    connection = None
    turn = number
    while time.monotonic() < end:
        prompt = turn % args.prompts
        turn += 1
        try:
            if connection is None:
                connection = await asyncio.open_connection(address.hostname, address.port)
            await ask(*connection, args, prompt)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            args.progress.fail(f"{type(error).__name__}: {error}"[:200])
            if connection is not None:
                connection[1].close()
            connection = None
            await asyncio.sleep(1.0)
    if connection is not None:
        connection[1].close()


async def send_request(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    args: argparse.Namespace,
    path: str,
    prompt: dict[str, Any],
    max_tokens: int,
) -> None:
    """Ask for a streamed answer, and read the head of it; ValueError unless its status is 200."""
    body = json.dumps(
        {
            **prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {args.host}\r\n".encode()
        + b"Content-Type: application/json\r\n"
        + (f"Authorization: Bearer {args.api_key}\r\n".encode() if args.api_key else b"")
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(maxsplit=2)[1]
    if status != b"200":
        raise ValueError(f"status {status.decode()}")


async def ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    args: argparse.Namespace,
    prompt: int,
) -> None:
    """One streamed answer, checked; ValueError says what is wrong with it."""
    body: dict[str, Any] = {"prompt": f"Prompt {prompt}: {args.prompt}"}
    if args.chat:
        body = {"messages": [{"role": "user", "content": body["prompt"]}]}
    path = CHAT if args.chat else COMPLETION
    before = time.monotonic()
    await send_request(reader, writer, args, path, body, args.max_tokens)
    digest: list[str] = []
    usage, done = None, False
    while size := int(await reader.readline(), 16):
        events = (await reader.readexactly(size + 2)).decode()
        now = time.monotonic()
        if digest:
            args.waits.add_gap(before, now)
        else:
            args.waits.first = max(args.waits.first, now - before)
        before = now
        for event in events.split("\n\n"):
            event = event.strip()
            if event == "data: [DONE]":
                done = True
            elif event:
                chunk = json.loads(event.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(f"error in stream: {chunk['error']['message']}")
                if chunk["choices"]:
                    choice = chunk["choices"][0]
                    digest.append(
                        choice["delta"].get("content", "") if args.chat else choice["text"]
                    )
                else:
                    usage = chunk["usage"]
    await reader.readline()
    if not done or usage is None:
        raise ValueError("a stream ended without [DONE] or usage")
    if usage["completion_tokens"] != args.max_tokens:
        raise ValueError(f"usage says {usage['completion_tokens']} tokens")
    text = "".join(digest)
    if args.progress.expected.setdefault(prompt, text) != text:
        args.progress.fail("an answer differs from the first one to its prompt")
    args.progress.answers += 1
    args.progress.tokens += usage["completion_tokens"]


async def watch_health(server: Server, args: argparse.Namespace) -> None:
    """Ask again and again, each time on a new connection."""
    address = urlsplit(server.url)
    while True:
        start = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(
                f"GET /health HTTP/1.1\r\nHost: {args.host}\r\nConnection: close\r\n\r\n".encode()
            )
            answer = await reader.read()
            writer.close()
            if answer.split(maxsplit=2)[1:2] != [b"200"]:
                args.progress.fail(f"/health: {answer[:200]!r}")
        except OSError as error:
            args.progress.fail(f"/health: {type(error).__name__}: {error}"[:200])
        args.waits.add_health(start, time.monotonic())
        await asyncio.sleep(HEALTH_SECONDS)


async def watch_lag(waits: Waits) -> None:
    """How late this process is for what it wants to do."""
    while True:
        start = time.monotonic()
        await asyncio.sleep(LAG_SECONDS)
        waits.client_lag = max(waits.client_lag, time.monotonic() - start - LAG_SECONDS)


async def send_worst_bodies(process: asyncio.subprocess.Process, args: argparse.Namespace) -> None:
    """Note what the process that sends them says of each."""
    assert process.stdout is not None
    async for line in process.stdout:
        said = json.loads(line)
        if "sending" in said:
            args.waits.begin(said["sending"])
            continue
        args.waits.end(said)
        if not 200 <= said["status"] < 500:
            args.progress.fail(f"{said['name']}: status {said['status']}: {said['reason']}"[:200])
    args.progress.fail(f"the client of the worst bodies ended with code {await process.wait()}")


@contextlib.asynccontextmanager
async def worst_client(server: Server, args: argparse.Namespace) -> AsyncIterator[None]:
    """A process that sends the worst bodies from now on, and has made them before."""
    command = [str(ROOT / "tools/worst_bodies.py"), "--url", server.url, "--seconds", "inf"]
    environment = dict(os.environ)
    if args.api_key:
        environment["MEGATRON_HYBRID_API_KEY"] = args.api_key
    if args.only:
        command += ["--only", *args.only]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    reader = None
    try:
        first = json.loads(await process.stdout.readline())
        args.waits.begin(first["sending"])
        reader = asyncio.create_task(send_worst_bodies(process, args))
        yield
    finally:
        if reader is not None:
            reader.cancel()
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    async with contextlib.AsyncExitStack() as stack:
        if args.worst_bodies:
            await stack.enter_async_context(worst_client(server, args))
        return await hold_streams(server, args)


async def hold_streams(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All streams until the end; what they saw."""
    start = time.monotonic()
    end = start + 60 * args.minutes
    samples: list[tuple[float, list[int]]] = []

    async def watch() -> None:
        while True:
            samples.append((time.monotonic() - start, server.memory()))
            await asyncio.sleep(SAMPLE_SECONDS)

    cpu, tokens = server.front_end_seconds(), args.progress.tokens
    watchers = [
        asyncio.create_task(watcher)
        for watcher in (watch(), watch_health(server, args), watch_lag(args.waits))
    ]
    await asyncio.gather(*(hold_stream(server, args, i, end) for i in range(args.streams)))
    for watcher in watchers:
        watcher.cancel()
    samples.append((time.monotonic() - start, server.memory()))
    sent = args.progress.tokens - tokens
    return {
        "streams": args.streams,
        "seconds": round(time.monotonic() - start, 1),
        "answers": args.progress.answers,
        "tokens": sent,
        "tokens_per_second": round(sent / (time.monotonic() - start), 1),
        "front_end_ms_per_token": round(
            1000 * (server.front_end_seconds() - cpu) / max(sent, 1), 4
        ),
        "memory_bytes": [[round(when), *sizes] for when, sizes in samples],
        "memory_growth_percent": (floor_growth if args.worst_bodies else memory_growth)(
            samples, 60 * args.warm_up
        ),
        "longest_gap": round(args.waits.gap, 3),
        "longest_until_first": round(args.waits.first, 3),
        "slowest_health": round(args.waits.health, 3),
        "client_lag": round(args.waits.client_lag, 3),
        "worst_bodies_sent": args.waits.sent,
        "worst_bodies": args.waits.bodies,
        "errors": args.progress.errors,
    }


def memory_growth(samples: list[tuple[float, list[int]]], warm: float) -> float:
    """Percent, from the minute that begins at `warm` seconds to the last one: of their medians,
    since a single sample may meet a step with a long prompt."""
    last = samples[-1][0] - 60
    first = [sum(sizes) for when, sizes in samples if warm <= when <= warm + 60]
    end = [sum(sizes) for when, sizes in samples if when >= last]
    if not first or not any(first):
        return 0.0  # shorter than the warm-up, or the server is gone
    return round(100 * (statistics.median(end) / statistics.median(first) - 1), 2)


def floor_growth(samples: list[tuple[float, list[int]]], warm: float) -> float:
    """Percent, from the least of the first half after `warm` seconds to that of the second: a large
    body takes memory for as long as it is worked on, and what leaks is there always."""
    half = (warm + samples[-1][0]) / 2
    first = [sum(sizes) for when, sizes in samples if warm <= when < half]
    second = [sum(sizes) for when, sizes in samples if when >= half]
    if not first or not min(first):
        return 0.0  # shorter than the warm-up, or the server is gone
    return round(100 * (min(second) / min(first) - 1), 2)


def in_use(server: Server) -> dict[str, int]:
    """What requests hold now on all replicas, from /metrics: rows, KV blocks, state slots."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        figures: dict[str, list[float]] = {}
        for line in page.read().decode().split("\n"):
            name, _, value = line.rpartition(" ")
            if name and not name.startswith("#"):
                plain = name.removeprefix("megatron_hybrid:").partition("{engine=")[0]
                figures.setdefault(plain, []).append(float(value))

    def shares_of(share: str, whole: str) -> int:
        return round(sum(a * b for a, b in zip(figures[share], figures[whole], strict=True)))

    return {
        "rows": round(sum(figures["num_requests_running"])),
        "blocks": shares_of("kv_cache_usage_perc", "kv_blocks"),
        "slots": shares_of("state_cache_usage_perc", "state_slots"),
    }


async def vanish(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """How long what a half of the streams held stays in use when their clients hang up."""
    address = urlsplit(server.url)
    generator = random.Random(1)
    connections = []

    async def open_stream() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        prompt = [generator.randrange(5, 500) for _ in range(VANISH_PROMPT_TOKENS)]
        await send_request(
            reader, writer, args, COMPLETION, {"prompt": prompt}, VANISH_ANSWER_TOKENS
        )
        connections.append((reader, writer))

    async def read(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass

    await asyncio.gather(*(open_stream() for _ in range(args.streams)))
    readers = [asyncio.create_task(read(reader)) for reader, _ in connections]
    most_rows = 0
    while (rows := (await asyncio.to_thread(in_use, server))["rows"]) < args.streams:
        if rows < most_rows:
            raise SystemExit(f"Answers ended before {args.streams} ran at once; lower --streams.")
        most_rows = rows
        await asyncio.sleep(0.05)
    half = args.streams // 2
    seen: dict[str, Any] = {"streams": args.streams, "all": in_use(server)}
    assert seen["all"]["blocks"] > (args.streams - half) * VANISH_BLOCKS, "nothing would be seen"
    for name, gone, left in (
        ("half", connections[:half], args.streams - half),
        ("rest", connections[half:], 0),
    ):
        start = time.monotonic()
        for _, writer in gone:
            writer.transport.abort()
        most = {"rows": left, "blocks": left * VANISH_BLOCKS, "slots": left}
        await asyncio.sleep(0)  # in which they are closed
        while True:
            now = await asyncio.to_thread(in_use, server)
            if all(now[what] <= most[what] for what in now):
                break
            if time.monotonic() - start > 60:
                raise SystemExit(f"After a minute these are still in use: {now}.")
            await asyncio.sleep(0.02)
        seen[name] = {"seconds": round(time.monotonic() - start, 3), "in_use": now}
    for task in readers:
        task.cancel()
    return seen


@contextlib.contextmanager
def started(flags: list[str], replicas: int) -> Iterator[Server]:
    """A server of our own, ended at the end; its replicas are launched one by one."""
    command = [sys.executable, str(ROOT / "tools/run_text_generation_server.py")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if replicas > 1:
        flags = ["--port", str(free_port()), "--data-parallel-size", str(replicas), *flags]
    else:
        flags = ["--port", "0", *flags]
    processes = [
        subprocess.Popen(
            [*command, *flags, "--data-parallel-rank", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(replicas)
    ]
    urls = []
    try:
        for process in processes:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"serving .* on (http://\S+)", line):
                    urls.append(found.group(1))
                    break
            else:
                raise SystemExit("The server ended; it has said why.")
        yield Server(urls[0], *(process.pid for process in processes))
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=2.0, help="minutes")
    parser.add_argument("--prompts", type=int, default=50, help="how many different ones")
    parser.add_argument("--prompt", default="The quick brown fox jumps over", help="their text")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--most-growth", type=float, default=2.0, help="of memory, in percent")
    parser.add_argument("--most-cpu", type=float, default=0.3, help="front end, ms a token")
    parser.add_argument("--vanish", action="store_true", help="half of the clients hang up")
    parser.add_argument("--most-seconds", type=float, default=1.0, help="with --vanish")
    parser.add_argument("--worst-bodies", action="store_true", help="beside the streams")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the worst bodies, these")
    parser.add_argument("--most-gap", type=float, default=0.15, help="s, with --worst-bodies")
    parser.add_argument("--replicas", type=int, default=1, help="behind one address")
    parser.add_argument("--url", help="of a server that runs; needs --pid")
    parser.add_argument("--pid", type=int, help="of that server's engine process, or torchrun's")
    parser.add_argument("--api-key", default=os.environ.get("MEGATRON_HYBRID_API_KEY"))
    parser.add_argument("--json", type=Path, help="where the figures go, besides the terminal")
    parser.add_argument("flags", nargs="*", help="of the server")
    args = parser.parse_args()
    if (args.url is None) != (args.pid is None):
        parser.error("--url and --pid go together.")
    args.progress, args.waits = Progress(), Waits()
    run = vanish if args.vanish else soak
    if args.url is not None:
        args.host = urlsplit(args.url).netloc
        figures = asyncio.run(run(Server(args.url, args.pid), args))
    else:
        steps = STEPS_BESIDE_BODIES if args.worst_bodies else []
        with started([*steps, *args.flags], args.replicas) as server:
            args.host = urlsplit(server.url).netloc
            figures = asyncio.run(run(server, args))
    text = json.dumps({"command": sys.argv, **figures}, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    if args.vanish:
        return int(any(figures[which]["seconds"] > args.most_seconds for which in ("half", "rest")))
    bad = (
        bool(figures["errors"])
        or figures["memory_growth_percent"] > args.most_growth
        or not figures["answers"]
    )
    if args.worst_bodies:  # they cost the front end what they cost
        bad = bad or max(figures["longest_gap"], figures["slowest_health"]) > args.most_gap
    else:
        bad = bad or figures["front_end_ms_per_token"] > args.most_cpu
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
