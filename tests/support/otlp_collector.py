"""A collector that receives OpenTelemetry traces over HTTP and gRPC, and keeps their spans.

``python -m tests.support.otlp_collector COMMAND…`` runs a command, and prints the trace of its slowest request for the
history.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector has received it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty without a parent."""
    start: float
    """Unix time."""
    end: float
    attributes: dict[str, Any]
    is_error: bool
    service: str
    """Name of the service."""
    scope: str
    """Name of the instrumentation scope."""
    job: str
    """Job of the resource."""

    @property
    def request(self) -> str:
        """Id of the request."""
        return str(self.attributes["rollout.request_id"])


class OtlpCollector:
    """Receives spans at addresses of its own."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        """Bodies of all requests."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.bodies.append(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

        class Service(TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
                collector.bodies.append(request.SerializeToString())
                return ExportTraceServiceResponse()

        self._grpc = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(Service(), self._grpc)
        self.grpc_url = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()

    def close(self) -> None:
        """Stop receiving."""
        self._grpc.stop(grace=None).wait()
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans so far."""
        return [span for body in list(self.bodies) for span in _spans(body)]

    def named(self, name: str, request_id: str | None = None) -> list[ReceivedSpan]:
        """Return the spans with a name, of one request or of all, ordered by sample."""
        found = [span for span in self.spans if span.name == name and request_id in (None, span.request)]
        return sorted(found, key=lambda span: span.attributes.get("rollout.sample", 0))


@contextmanager
def collected_traces(environment: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    """Run a collector, and let processes with this environment send their traces to it."""
    collector = OtlpCollector()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    try:
        yield collector
    finally:
        collector.close()


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes=_attributes(span.attributes),
                    is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    service=resource["service.name"],
                    scope=scope_spans.scope.name,
                    job=resource["rollout.job"],
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _describe(spans: list[ReceivedSpan]) -> Iterator[str]:
    """Yield lines about the spans of the slowest request for the history."""
    requests = [span for span in spans if span.name == "rollout.request"]
    yield f"{len(spans)} spans of {len(requests)} requests; the slowest request for the history:"
    appended = {span.parent_id for span in spans if span.name == "history.append"}
    slowest = max((span for span in requests if span.span_id in appended), key=lambda span: span.end - span.start)
    children = sorted((span for span in spans if span.parent_id == slowest.span_id), key=_position)
    for span in (slowest, *children):
        name = span.name if span is slowest else f"  {span.name}"
        start, end = span.start - slowest.start, span.end - slowest.start
        counts = {key: span.attributes.get(f"rollout.{key}") for key in ("sample", "tokens", "accepted_tokens")}
        shown = " ".join(f"{key}={value}" for key, value in counts.items() if value is not None)
        yield f"{name:18}{start:8.3f} s to {end:8.3f} s  {shown}".rstrip()


def _position(span: ReceivedSpan) -> tuple[int, float]:
    return span.attributes["rollout.sample"], span.start


def main() -> int:
    """Run the command in the arguments, and print what it has traced."""
    collector = OtlpCollector()
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    code = subprocess.run(sys.argv[1:], env=environment, check=False).returncode
    collector.close()
    print(*_describe(collector.spans), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
