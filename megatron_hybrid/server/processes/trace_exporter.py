"""The process that sends traces to an OpenTelemetry collector (--otlp-traces-endpoint).

Workers send it what they know of requests that have ended. It makes spans of that; OpenTelemetry's
SDK sends them in batches, drops what no collector takes, and reads its own variables (OTEL_*).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import zmq

from megatron_hybrid import __version__
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.link.parent import end_with_parent
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.link.traces import (
    MOST_QUEUED,
    TRACES,
    AnswerTrace,
    RequestTrace,
    decode_trace,
)
from megatron_hybrid.server.log_format import set_up_logging
from megatron_hybrid.server.options import OTLP_PROTOCOLS, FrontEndSettings, ServerOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

COMMAND = ("-m", "megatron_hybrid.server.processes.trace_exporter")  # for the interpreter
POLL_SECONDS = 0.1  # how soon a signal is seen
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP_PATH = "/v1/traces"  # where a collector takes them, unless the URL says more
MOST_ANSWERS = 16  # of a request, whose spans are shown
NICE = 10  # streams go first
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


def main() -> int:
    """Export until SIGTERM comes, with the settings on standard input; the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontEndSettings)
    options = settings.options
    set_up_logging(options.log_format, "traces", "%(asctime)s traces: ", logging.ERROR)
    end_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: ending.append(signum))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(MOST_QUEUED)
    socket.bind(RunFolder(Path(settings.folder)).endpoint(TRACES))
    spans = Spans(make_provider(make_exporter(options)))
    # What came before the signal is still sent.
    while socket.poll(int(1000 * POLL_SECONDS)) or not ending:
        while socket.poll(0):
            spans.add(decode_trace(socket.recv()))
    spans.close()
    return 0


def check_tracing(options: ServerOptions) -> None:
    """ConfigurationError where traces are wanted and can't be sent."""
    url = options.otlp_traces_endpoint
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ConfigurationError(
            f"--otlp-traces-endpoint is {url!r}; it must be a URL such as http://localhost:4317."
        )
    protocol = _protocol(options)
    try:
        is_there = all(map(find_spec, ("opentelemetry.sdk.trace", _EXPORTERS[protocol])))
    except ModuleNotFoundError:  # not even what these are in
        is_there = False
    if not is_there:
        raise ConfigurationError(
            "--otlp-traces-endpoint needs OpenTelemetry's SDK and its exporter for "
            f"{protocol}, which are not installed: pip install 'megatron-hybrid[otel]'."
        )


def make_exporter(options: ServerOptions) -> SpanExporter:
    """OpenTelemetry's own, for this endpoint and protocol."""
    protocol, url = _protocol(options), options.otlp_traces_endpoint or ""
    if protocol != "grpc" and urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + HTTP_PATH
    exporter: SpanExporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter(endpoint=url)
    return exporter


def _protocol(options: ServerOptions) -> str:
    if options.otlp_traces_protocol is not None:
        return options.otlp_traces_protocol
    for name in PROTOCOL_VARIABLES:
        if found := os.environ.get(name):
            if found not in OTLP_PROTOCOLS:
                known = ", ".join(OTLP_PROTOCOLS)
                raise ConfigurationError(f"{name} is {found!r}; it must be one of {known}.")
            return found
    return OTLP_PROTOCOLS[0]


def make_provider(exporter: SpanExporter) -> TracerProvider:
    """Spans of this service, sent in batches. What the variables OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES say of it wins."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {"service.name": "megatron-hybrid", "service.version": __version__}
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Spans:
    """Makes a span of each request and, below it, of what it waited for: `prepare` in the front
    end, then of each answer `queued`, `prefill` and `decode` in the engine."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("megatron_hybrid", __version__)
        self._parents = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()

    def add(self, trace: RequestTrace) -> None:
        """Its spans end now, and go with the next batch."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            trace.name,
            self._parents.extract(trace.parent),
            SpanKind.SERVER,
            trace.attributes,
            start_time=_at(trace, 0.0),
        )
        if trace.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(span)
        if trace.submitted is not None:
            self._add_phase(context, trace, "prepare", 0.0, trace.submitted)
        for number, answer in enumerate(trace.answers[:MOST_ANSWERS]):
            self._add_answer(context, trace, number, answer)
        span.end(_at(trace, trace.seconds))

    def _add_answer(
        self, context: Any, trace: RequestTrace, number: int, answer: AnswerTrace
    ) -> None:
        """As far as is known when its phases ended."""
        if answer.begun is None:
            return
        which = {"megatron_hybrid.answer": number} if len(trace.answers) > 1 else {}
        submitted = min(trace.submitted or 0.0, answer.begun)
        self._add_phase(context, trace, "queued", submitted, answer.begun, **which)
        if answer.first_token is None:
            return
        tokens = {
            "megatron_hybrid.cached_tokens": answer.cached_tokens,
            "megatron_hybrid.computed_tokens": answer.prompt_tokens - answer.cached_tokens,
        }
        self._add_phase(
            context, trace, "prefill", answer.begun, answer.first_token, **which, **tokens
        )
        tokens = {
            "megatron_hybrid.tokens": answer.tokens,
            "megatron_hybrid.preemptions": answer.preemptions,
        }
        end = trace.seconds if answer.ended is None else answer.ended
        end = max(end, answer.first_token)
        self._add_phase(context, trace, "decode", answer.first_token, end, **which, **tokens)

    def _add_phase(
        self, context: Any, trace: RequestTrace, name: str, start: float, end: float, **values: int
    ) -> None:
        phase = self._tracer.start_span(
            name, context, attributes=values, start_time=_at(trace, start)
        )
        phase.end(_at(trace, end))


def _at(trace: RequestTrace, seconds: float) -> int:
    """Nanoseconds since 1970, of a time that is counted from the request's start."""
    return int(trace.started * 1e9) + int(seconds * 1e9)


if __name__ == "__main__":
    sys.exit(main())
