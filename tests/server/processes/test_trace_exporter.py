"""Traces as a collector gets them."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.link.traces import AnswerTrace, RequestTrace
from megatron_hybrid.server.options import OTLP_PROTOCOLS, ServerOptions
from megatron_hybrid.server.processes import trace_exporter
from megatron_hybrid.server.processes.trace_exporter import Spans, check_tracing, make_exporter
from tests.server.http.test_tracing import PARENT
from tests.server.running import ServerProcess, http_server, python_path, wait_until
from tests.thorough import thorough

pytest.importorskip("opentelemetry.sdk")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE_ID = int(PARENT.split("-")[1], 16)
SPAN_ID = int(PARENT.split("-")[2], 16)
STARTED = 1_700_000_000 * 10**9  # nanoseconds


def trace(**changes: Any) -> RequestTrace:
    values: dict[str, Any] = {
        "name": "chat m",
        "started": STARTED / 1e9,
        "seconds": 3.0,
        "status": 200,
        "attributes": {"gen_ai.usage.input_tokens": 10, "gen_ai.response.finish_reasons": ["stop"]},
        "parent": {"traceparent": PARENT},
        "submitted": 0.25,
        "answers": [AnswerTrace(10, 4, 7, 0.5, 1.0, 2.75, "stop", 2)],
    }
    return RequestTrace(**values | changes)


def spans_of(*traces: RequestTrace) -> list[Any]:
    """The request's span first, then those below it in the order of their beginnings."""
    memory = export.InMemorySpanExporter()
    spans = Spans(trace_exporter.make_provider(memory))
    for one in traces:
        spans.add(one)
    spans.close()
    return sorted(memory.get_finished_spans(), key=lambda one: (one.start_time, -one.end_time))


def seconds(span: Any) -> tuple[float, float]:
    return (span.start_time - STARTED) / 1e9, (span.end_time - STARTED) / 1e9


def test_a_request_is_a_span_below_its_clients_with_what_the_engine_did_below_it() -> None:
    root, *phases = spans_of(trace())
    assert (
        root.name == "chat m" and root.kind.name == "SERVER" and root.status.status_code.value == 0
    )
    assert (root.context.trace_id, root.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert dict(root.attributes) == {
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert seconds(root) == (0.0, 3.0)
    assert [(one.name, *seconds(one)) for one in phases] == [
        ("prepare", 0.0, 0.25),
        ("queued", 0.25, 0.5),
        ("prefill", 0.5, 1.0),
        ("decode", 1.0, 2.75),
    ]
    assert all(one.parent.span_id == root.context.span_id for one in phases)
    assert dict(phases[2].attributes) == {
        "megatron_hybrid.cached_tokens": 4,
        "megatron_hybrid.computed_tokens": 6,
    }
    assert dict(phases[3].attributes) == {
        "megatron_hybrid.tokens": 7,
        "megatron_hybrid.preemptions": 2,
    }
    assert root.resource.attributes["service.name"] == "megatron-hybrid"


def test_spans_end_where_a_request_did() -> None:
    (refused,) = spans_of(trace(submitted=None, answers=[], status=400, parent={}))
    assert refused.parent is None and refused.status.status_code.name == "UNSET"
    root, prepare, queued = spans_of(trace(answers=[AnswerTrace(10, 0, 0, 0.5)], status=504))
    assert (prepare.name, queued.name) == ("prepare", "queued")
    assert root.status.status_code.name == "ERROR"
    *_, decode = spans_of(trace(answers=[AnswerTrace(10, 0, 5, 0.5, 1.0)], status=499))
    assert decode.name == "decode" and seconds(decode) == (1.0, 3.0)


def test_of_many_answers_some_are_shown_by_their_numbers() -> None:
    answers = [AnswerTrace(10, 4, 7, 0.5, 1.0, 2.75)] * 20
    decodes = [one for one in spans_of(trace(answers=answers)) if one.name == "decode"]
    numbers = [one.attributes["megatron_hybrid.answer"] for one in decodes]
    assert sorted(numbers) == list(range(trace_exporter.MOST_ANSWERS))


def test_a_trace_that_its_client_does_not_record_is_not_sent() -> None:
    assert spans_of(trace(parent={"traceparent": PARENT[:-1] + "0"})) == []


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    (root, *_) = spans_of(trace())
    assert root.resource.attributes["service.name"] == "mine"


def options(endpoint: str | None, protocol: str | None = None) -> ServerOptions:
    return ServerOptions(
        tokenizer_folder="",
        model_name="fake",
        otlp_traces_endpoint=endpoint,
        otlp_traces_protocol=protocol,
    )


def test_what_cannot_be_sent_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(options(None))
    for url in ("localhost:4317", "ftp://x", "http://"):
        with pytest.raises(ConfigurationError, match="it must be a URL such as http://localhost"):
            check_tracing(options(url))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; it "):
        check_tracing(options("http://x"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    check_tracing(options("http://x"))
    missing = {**trace_exporter._EXPORTERS, "grpc": "opentelemetry.none.trace_exporter"}
    monkeypatch.setattr(trace_exporter, "_EXPORTERS", missing)
    with pytest.raises(ConfigurationError, match="exporter for grpc, which are not installed: pip"):
        check_tracing(options("http://x", "grpc"))


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://x:4318", "http://x:4318/v1/traces"),
        ("http://x:4318/", "http://x:4318/v1/traces"),
        ("https://x/mine", "https://x/mine"),
    ],
)
def test_a_collectors_path_over_http_is_the_usual_one(given: str, used: str) -> None:
    exporter: Any = make_exporter(options(given, "http/protobuf"))
    assert exporter._endpoint == used


class Collector(BaseHTTPRequestHandler):
    """Takes traces over HTTP."""

    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """Its address."""
    Collector.received = []
    with http_server(Collector) as address:
        yield address


def received() -> dict[str, Any]:
    """Spans by name."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    found: dict[str, Any] = {}
    for data in Collector.received:
        for of_service in service.ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in of_service.scope_spans:
                found |= {span.name: span for span in scope.spans}
    return found


def complete(server: ServerProcess, **fields: Any) -> Any:
    body = {"prompt": "abc", "max_tokens": 3, **fields}
    headers = {"Content-Type": "application/json", "traceparent": PARENT}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_traces_reach_a_collector_in_batches_and_at_the_end(tokenizer_folder: Path) -> None:
    command = ("-m", "tests.server.fake_server", "--tokenizer", str(tokenizer_folder))
    batches = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5", "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    with collector() as url:
        flags = ("--otlp-traces-endpoint", url, "--otlp-traces-protocol", "http/protobuf")
        with ServerProcess(*command, *flags, PYTHONPATH=python_path(), **batches) as server:
            complete(server)
            wait_until(lambda: bool(Collector.received))
            spans = received()
            with pytest.raises(urllib.error.HTTPError):
                complete(server, temperature=-1)
            assert server.stop() == 0
        root = spans.pop("text_completion fake")
        assert spans.keys() == {"prepare", "queued", "prefill", "decode"}
        assert root.trace_id.hex() == PARENT.split("-")[1]
        assert root.parent_span_id.hex() == PARENT.split("-")[2]
        assert all(span.parent_span_id == root.span_id for span in spans.values())
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
        assert received()["text_completion"].trace_id == root.trace_id


@thorough
@pytest.mark.parametrize("protocol", OTLP_PROTOCOLS)
def test_a_collector_that_never_answers_slows_nobody(tokenizer_folder: Path, protocol: str) -> None:
    pytest.importorskip("grpc")
    command = ("-m", "tests.server.fake_server", "--tokenizer", str(tokenizer_folder))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = ("--otlp-traces-endpoint", url, "--otlp-traces-protocol", protocol)
        with ServerProcess(*command, *flags, PYTHONPATH=python_path()) as server:
            complete(server)
            silent.accept()  # the exporter waits for it
            began = time.monotonic()
            for _ in range(50):
                complete(server)
            assert time.monotonic() - began < 5
            assert server.stop() == 0
