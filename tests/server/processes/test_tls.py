"""TLS: a wrong certificate is refused at the start; a server with a right one, end to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.ask import FirstQuestion
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import LaunchOptions, ServerOptions
from megatron_hybrid.server.processes.launch import _digest
from megatron_hybrid.server.tls import check_certificate
from tests.server.processes.test_processes import FAKE, JSON, LONG
from tests.server.running import ServerProcess, wait_until

KEY = "sesame"
HEADERS = {**JSON, "Authorization": f"Bearer {KEY}"}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a certificate that signs itself, for localhost, and of its key."""
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    files = ("-out", certificate, "-keyout", key, "-days", "2")
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *subject, *files], check=True, capture_output=True
    )
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, files: tuple[str, str]) -> Iterator[ServerProcess]:
    flags = ("--ssl-certfile", files[0], "--ssl-keyfile", files[1], "--api-key", KEY)
    flags += ("--step-seconds", "0.02", "--never-fails", "--max-seq-length", "100000")
    with ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server:
        yield server
        assert server.stop() == 0
    assert "Traceback" not in server.output and "Error" not in server.output


@pytest.fixture
def trusting(files: tuple[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


def connect(server: ServerProcess, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(urlsplit(server.url).netloc, timeout=20, context=context)


def ask(connection: http.client.HTTPSConnection, body: dict[str, Any]) -> Any:
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    return connection.getresponse()


def running(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", "/stats", headers=HEADERS)
    return int(json.load(connection.getresponse())["engine"]["requests_running"])


@needs_openssl
def test_requests_of_one_connection_are_answered(
    server: ServerProcess, trusting: ssl.SSLContext
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    connection = connect(server, trusting)
    body = {**LONG, "max_tokens": 3}
    for stream in (False, True, False):
        answer = ask(connection, {**body, "stream": stream})
        assert answer.status == 200
        assert not answer.will_close
        text = answer.read()
        assert text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]
    long = ask(connection, {"prompt": "a" * 300_000, "n": 0})  # more than a record holds
    assert (long.status, long.read()[:9]) == (400, b'{"error":')
    connection.request("GET", "/dashboard/main.js")
    assert connection.getresponse().read().startswith(b"//")
    connection.close()


@needs_openssl
def test_its_own_page_is_one_that_came_by_tls(
    server: ServerProcess, trusting: ssl.SSLContext
) -> None:
    connection = connect(server, trusting)
    plain = server.url.replace("https", "http")
    for origin, status in ((server.url, 200), (plain, 403)):
        connection.request("POST", "/resume", headers={**HEADERS, "Origin": origin})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


@needs_openssl
@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_the_engine(
    server: ServerProcess, trusting: ssl.SSLContext, stream: bool, politely: bool
) -> None:
    """With TLS's own goodbye before the end, or without."""
    observer, connection = connect(server, trusting), connect(server, trusting)
    body = json.dumps({**LONG, "max_tokens": 90_000, "stream": stream})
    connection.request("POST", "/v1/completions", body, HEADERS)
    wait_until(lambda: running(observer) == 1)
    if politely:
        connection.sock.settimeout(0.0)
        with contextlib.suppress(ssl.SSLError):
            connection.sock.unwrap()  # sends it, and does not wait for the server's
    connection.close()
    wait_until(lambda: running(observer) == 0)
    observer.close()


@needs_openssl
def test_clients_that_speak_no_tls_or_do_not_trust_it_are_hung_up_on(
    server: ServerProcess, trusting: ssl.SSLContext
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(connect(server, ssl.create_default_context()), LONG)
    address = urlsplit(server.url)
    for data in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff", b""):
        with socket.create_connection((address.hostname, address.port), timeout=20) as client:
            client.sendall(data)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
                while client.recv(100):
                    pass
    connection = connect(server, trusting)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.sock.detach()


@needs_openssl
def test_the_last_bytes_come_with_a_goodbye(
    server: ServerProcess, trusting: ssl.SSLContext
) -> None:
    """So that nobody takes an answer without a length for one that was cut off."""
    address = urlsplit(server.url)
    plain = socket.create_connection((address.hostname, address.port), timeout=20)
    with trusting.wrap_socket(
        plain, server_hostname="localhost", suppress_ragged_eofs=False
    ) as client:
        client.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.0 200")


@needs_openssl
def test_the_first_question_trusts_its_server_and_no_other(
    server: ServerProcess,
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other, _ = make_certificate(tmp_path, "other")
    for certfile, failed in ((files[0], False), (other, True)):
        options = ServerOptions(
            tokenizer_folder="", model_name="fake", api_keys=(ApiKey(KEY, "key"),),
            ssl_certfile=certfile,
        )  # fmt: skip
        question = FirstQuestion(LaunchOptions(ask="Hello"), options, lambda: None)
        question.ask(server.url)
        assert question.failed == failed, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "prompt tokens from the cache" in said and "certificate verify failed" in said


@needs_openssl
def test_keys_are_in_no_command_line_of_the_front_end(server: ServerProcess) -> None:
    """That of the engine process shows what it was started with."""
    descendants = server.descendants()
    assert len(descendants) >= 2
    for pid in descendants:
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@needs_openssl
def test_what_is_wrong_with_a_certificate_is_said(files: tuple[str, str], tmp_path: Path) -> None:
    certificate, key = files
    check_certificate(None, None)
    check_certificate(certificate, key)
    both, words, locked = tmp_path / "both.pem", tmp_path / "words.pem", tmp_path / "locked.key"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    words.write_text("these are words")
    encrypt = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-in", key, "-out", locked], check=True, capture_output=True)
    check_certificate(str(both), None)
    _, other = make_certificate(tmp_path, "other")
    for pair, words_of in (
        ((None, key), "--ssl-keyfile needs --ssl-certfile"),
        (("/nowhere.pem", key), r"/nowhere.pem \(--ssl-certfile\) cannot be read: No such file"),
        ((certificate, "/nowhere"), r"/nowhere \(--ssl-keyfile\) cannot be read: No such file"),
        ((str(tmp_path), key), r"\(--ssl-certfile\) cannot be read: Is a directory"),
        ((certificate, other), "the key is not the certificate's"),
        ((certificate, None), "a PEM certificate and its key are wanted"),
        ((certificate, str(words)), "a PEM certificate and its key are wanted"),
        ((str(words), key), "a PEM certificate and its key are wanted"),
        ((certificate, str(locked)), "is encrypted"),
    ):
        with pytest.raises(ConfigurationError, match=words_of):
            check_certificate(*pair)


def test_a_renewed_certificate_makes_a_new_front_end(tmp_path: Path) -> None:
    """One that an engine process has left is not taken over with the old one."""
    certificate = tmp_path / "a.pem"
    certificate.write_text("old")
    options = ServerOptions(
        tokenizer_folder=str(tmp_path), model_name="fake", ssl_certfile=str(certificate)
    )
    before = _digest(options)
    assert _digest(options) == before
    certificate.write_text("renewed")
    assert _digest(options) != before


def test_another_chat_template_makes_a_new_front_end(tmp_path: Path) -> None:
    template = tmp_path / "chat.txt"
    template.write_text("old")
    options = ServerOptions(tokenizer_folder="", model_name="fake", chat_template=str(template))
    before = _digest(options)
    template.write_text("another")
    assert _digest(options) != before
