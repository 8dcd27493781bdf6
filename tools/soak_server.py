#!/usr/bin/env python
r"""Holds many streams on a server for a long time, and checks every answer and its processes.

    python tools/soak_server.py --minutes 30                         the reference model
    python tools/soak_server.py --streams 500 --minutes 30 -- --load DIR
    python tools/soak_server.py --url http://127.0.0.1:5000 --pid PID
    python tools/soak_server.py --streams 200 --vanish           half of the clients hang up at once
    python tools/soak_server.py --replicas 2                     two replicas behind one address

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
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 10.0
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
        return [int(_read(pid, "statm").split()[1]) * _PAGE for pid in self.processes()]

    def front_end_seconds(self) -> float:
        """Processor time, user and system, of the front end's processes so far."""
        return sum(
            sum(map(int, _read(pid, "stat").rpartition(")")[2].split()[11:13])) / _TICKS
            for pid, command in self.processes().items()
            if "megatron_hybrid.server.front_end" in command
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
        b"POST %s HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n" % path.encode()
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
    await send_request(reader, writer, args, path, body, args.max_tokens)
    digest, usage, done = [], None, False
    while size := int(await reader.readline(), 16):
        events = (await reader.readexactly(size + 2)).decode()
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


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    start = time.monotonic()
    end = start + 60 * args.minutes
    samples: list[tuple[float, list[int]]] = []

    async def watch() -> None:
        while True:
            samples.append((time.monotonic() - start, server.memory()))
            await asyncio.sleep(SAMPLE_SECONDS)

    cpu, tokens = server.front_end_seconds(), args.progress.tokens
    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(hold_stream(server, args, i, end) for i in range(args.streams)))
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
        "memory_growth_percent": memory_growth(samples, 60 * args.warm_up),
        "errors": args.progress.errors,
    }


def memory_growth(samples: list[tuple[float, list[int]]], warm: float) -> float:
    """Percent, from the minute that begins at `warm` seconds to the last one: of their medians,
    since a single sample may meet a step with a long prompt."""
    last = samples[-1][0] - 60
    first = [sum(sizes) for when, sizes in samples if warm <= when <= warm + 60]
    end = [sum(sizes) for when, sizes in samples if when >= last]
    if not first:
        return 0.0  # shorter than the warm-up
    return round(100 * (statistics.median(end) / statistics.median(first) - 1), 2)


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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = ["--port", str(port), "--data-parallel-size", str(replicas), *flags]
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
    parser.add_argument("--replicas", type=int, default=1, help="behind one address")
    parser.add_argument("--url", help="of a server that runs; needs --pid")
    parser.add_argument("--pid", type=int, help="of that server's engine process, or torchrun's")
    parser.add_argument("--api-key", default=os.environ.get("MEGATRON_HYBRID_API_KEY"))
    parser.add_argument("--json", type=Path, help="where the figures go, besides the terminal")
    parser.add_argument("flags", nargs="*", help="of the server")
    args = parser.parse_args()
    if (args.url is None) != (args.pid is None):
        parser.error("--url and --pid go together.")
    args.progress = Progress()
    run = vanish if args.vanish else soak
    if args.url is not None:
        figures = asyncio.run(run(Server(args.url, args.pid), args))
    else:
        with started(args.flags, args.replicas) as server:
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
        or figures["front_end_ms_per_token"] > args.most_cpu
        or not figures["answers"]
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
