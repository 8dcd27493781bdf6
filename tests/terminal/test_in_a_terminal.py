"""`megatron-hybrid chat` as a process, on a terminal and in a pipe, with a server of real
processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.server.running import ROOT, ServerProcess, wait_until

FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
LONG = "12345 " * 40  # which is said again, and takes seconds
CHAT = [sys.executable, "-m", "megatron_hybrid.cli", "chat", "--url"]
KEY = "sesame"
ENVIRONMENT = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "MEGATRON_HYBRID_API_KEY": KEY}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    flags = ("--step-seconds", "0.02", "--max-seq-length", "512", "--api-key", KEY)
    with ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server:
        yield server


class OnTerminal:
    """A chat whose standard input and output are a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*CHAT, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        os.close(theirs)
        self.shown = ""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str) -> None:
        """Until this is shown, after what was waited for before."""
        wait_until(lambda: text in self.shown[self._seen :])
        self._seen = self.shown.index(text, self._seen) + len(text)

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def _read(self) -> None:
        with suppress(OSError):  # of a terminal that nobody has any more
            while data := os.read(self._ours, 4096):
                self.shown += data.decode("utf-8", "replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._ours)


def test_a_dialogue_on_a_terminal(server: ServerProcess, tmp_path: Path) -> None:
    chat = OnTerminal(server.url, "--max-tokens", "400", "--temperature", "0")
    try:
        chat.wait_for("Ctrl-D leaves.")
        chat.wait_for("> ")
        chat.type("The fox\\")
        chat.type(LONG)
        chat.wait_for("12345 \r\n")
        chat.wait_for("The fox")  # the answer begins
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("[Ctrl-C again leaves]")
        # The request has ended in the server, too, long before its 400 tokens came.
        server.wait_for_line(r"(status=499 )", 10)
        chat.type("/new")
        chat.wait_for("A new chat.")
        chat.type("\x1b[200~blue\n  green\x1b[201~")  # as terminals send what is pasted
        chat.wait_for("answer tokens")
        chat.type(f"/save {tmp_path / 'chat.json'}")
        chat.wait_for("Saved")
        first = json.loads((tmp_path / "chat.json").read_text())["messages"][0]
        assert first == {"role": "user", "content": "blue\n  green"}
        chat.type("/quit")
        assert chat.process.wait(10) == 0
    finally:
        chat.close()


def test_a_question_in_a_pipe_is_answered_from_the_cache_the_second_time(
    server: ServerProcess,
) -> None:
    for least in (0, 4):
        done = subprocess.run(
            [*CHAT, server.url, "--max-tokens", "8"],
            input="A question\x1b[31m in a pipe",
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        assert done.returncode == 0 and done.stdout.endswith("\n")
        assert "\x1b" not in done.stdout
        figures = r"\[\d+ prompt tokens, (\d+) of them cached; 8 answer tokens; first after"
        assert (found := re.match(figures, done.stderr)), done.stderr
        assert int(found[1]) >= least


def test_a_wrong_key_is_a_sentence(server: ServerProcess) -> None:
    done = subprocess.run(
        [*CHAT, server.url, "--api-key", "wrong", "Well?"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "MEGATRON_HYBRID_API_KEY, has the key" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_at_one_question_ends_with_130(server: ServerProcess) -> None:
    process = subprocess.Popen(
        [*CHAT, server.url, LONG, "--max-tokens", "400", "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, b"")


def test_whoever_reads_no_further_gets_no_traceback(server: ServerProcess) -> None:
    process = subprocess.Popen(
        [*CHAT, server.url, LONG, "--max-tokens", "100", "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(10) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
