"""Sends spans with OpenTelemetry's SDK. Only the thread of the trace exporter imports this module."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from rollout_worker.job.limits import FAILURE_LOG_INTERVAL_S
from rollout_worker.job.request_trace import RequestTrace
from rollout_worker.job.tracing.spans import REQUEST_SPAN, SpanData

logger = logging.getLogger(__name__)

_SERVICE = "rollout"
"""Name of the service if the environment sets none."""
_SPANS_PER_FLUSH = 256
"""Number of spans after which all are sent, so that the SDK's queue does not overflow after a large step."""
_NANOSECONDS = 10**9


class SpanSender:
    """Sends spans to the collector, and samples traces, as the environment variables of OpenTelemetry say."""

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        """Create the SDK's objects.

        Args:
            service: name of the instrumentation scope.
            resource: attributes of the resource, in addition to those of the environment.
        """
        self._ids = _GivenIds()
        described = Resource.create(dict(resource))
        if str(described.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            described = described.merge(Resource({SERVICE_NAME: _SERVICE}))
        self._provider = TracerProvider(resource=described, id_generator=self._ids, shutdown_on_exit=False)
        self._exporter = _ReportingExporter(_otlp_exporter())
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(f"das-rollout.{service}")
        self._unflushed = 0

    @property
    def has_failed(self) -> bool:
        """Whether the collector has not accepted the last spans."""
        return self._exporter.has_failed

    def send(self, data: SpanData) -> None:
        """Send a span with the next batch. This may wait for the collector."""
        caller = _caller(data.trace)
        self._ids.trace_id, self._ids.span_id = data.trace.trace_id, data.span_id
        span = self._tracer.start_span(
            data.name,
            context=caller if data.is_request else self._request(data.trace, caller),
            kind=SpanKind.CONSUMER if data.is_request else SpanKind.INTERNAL,
            attributes=data.attributes,
            start_time=int(data.started_at * _NANOSECONDS),
        )
        if data.has_failed:
            span.set_status(StatusCode.ERROR, "a rollout failed" if data.is_request else "the rollout failed")
        span.end(int(data.ended_at * _NANOSECONDS))
        self._unflushed += 1
        if self._unflushed >= _SPANS_PER_FLUSH:
            self._unflushed = 0
            self._provider.force_flush()

    def close(self) -> None:
        """Send all spans."""
        self._provider.shutdown()

    def _request(self, request: RequestTrace, caller: Context) -> Context:
        """Return the context of the children of a request's span.

        The span may come from another process, or later. The sampler therefore decides here, too, whether it is
        recorded; the decision of the standard samplers depends on the trace id and the caller alone.
        """
        decision = self._provider.sampler.should_sample(caller, request.trace_id, REQUEST_SPAN).decision
        return _context(request.trace_id, request.span_id, decision.is_sampled())


def _caller(request: RequestTrace) -> Context:
    """Return the context of the caller of a request; an empty one if there is none."""
    if not request.caller_span_id:
        return Context()
    return _context(request.trace_id, request.caller_span_id, request.caller_sampled)


def _context(trace_id: int, span_id: int, is_sampled: bool) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    span = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
    return trace.set_span_in_context(span, Context())


def _otlp_exporter() -> SpanExporter:
    """Return the exporter for the protocol that the environment names.

    Raises:
        ValueError: the protocol is unknown.
    """
    name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(name) or "http/protobuf"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    raise ValueError(f"{name} is {protocol!r}; use http/protobuf or grpc")


class _GivenIds(IdGenerator):
    """Gives each span the ids that were set before."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _ReportingExporter(SpanExporter):
    """Logs now and then that spans cannot be sent, in place of the SDK, which logs every attempt."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.has_failed = False
        """Whether the last spans were not accepted."""
        self._exporter = exporter
        self._messages = _FirstMessage()
        self._logged_at = -FAILURE_LOG_INTERVAL_S
        sdk_logger = logging.getLogger("opentelemetry.exporter.otlp")
        sdk_logger.addHandler(self._messages)
        sdk_logger.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._messages.text = ""
        result = self._exporter.export(spans)
        self.has_failed = result is not SpanExportResult.SUCCESS
        now = time.monotonic()
        if self.has_failed and now - self._logged_at >= FAILURE_LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning("Spans are dropped, because the collector does not accept them: %s", self._messages.text)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _FirstMessage(logging.Handler):
    """Remembers the first message of a logger since the text was cleared."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()
