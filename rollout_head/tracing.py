"""OpenTelemetry traces of requests, from their arrival to the history.

Spans are made after the fact from what the job has recorded about its rollouts. A span has times, ids and counts, but
never a prompt or a response. OpenTelemetry's SDK is imported only if the environment asks for traces.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_api.protocol.messages import FinishReason, RolloutId
from rollout_api.protocol.timeline import EndedRollout
from rollout_store.job.limits import MAX_WAITING_SPANS, TRACE_FLUSH_TIMEOUT_S
from rollout_store.job.request_trace import RequestTrace, span_id_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables that ask for traces; one of them is enough."""
_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
_DEFAULT_SERVICE_NAME = "rollout"
_NANOSECONDS = 10**9

REQUEST_SPAN = "rollout.request"
"""From the arrival of a request in Redis to the end of its last rollout; the parent of the other spans."""
QUEUE_SPAN = "queue"
"""From the arrival of the request until an engine starts a rollout, or until the rollout ends without an engine."""
SAMPLE_SPAN = "sample"
"""From the start of a rollout, on the engine that has ended it, to its end."""
APPEND_SPAN = "history.append"
"""From the end of a rollout until the history contains it."""

AttributeValue = str | int


@dataclass(frozen=True)
class SpanData:
    """A span that has ended."""

    name: str
    trace: RequestTrace
    span_id: int
    started_at: float
    """Unix time."""
    ended_at: float
    """Unix time, not before ``started_at``."""
    attributes: Mapping[str, AttributeValue]
    has_failed: bool = False

    @property
    def is_request(self) -> bool:
        """Whether it is the span of the request, and not one of its children."""
        return self.span_id == self.trace.span_id


def spans_of_rollout(trace: RequestTrace, ended: EndedRollout) -> list[SpanData]:
    """Return the spans of a rollout that has ended: how long it has waited, and how it was sampled.

    The clocks of engines may differ from that of Redis; the start of a rollout is moved between the arrival of its
    request and its end.
    """
    common = _request_attributes(ended) | {"rollout.sample": ended.sample}
    outcome: dict[str, AttributeValue] = {"rollout.finish_reason": ended.finish_reason}
    has_failed = ended.finish_reason == FinishReason.FAILED
    finished_at = max(ended.arrived_at, ended.finished_at)
    if not ended.engine:
        attributes = common | outcome
        return [_child(trace, QUEUE_SPAN, ended.sample, ended.arrived_at, finished_at, attributes, has_failed)]
    started_at = min(max(ended.arrived_at, ended.started_at), finished_at)
    counts: dict[str, AttributeValue] = {
        "rollout.engine": ended.engine,
        "rollout.draft_mode": ended.draft_mode,
        "rollout.prompt_tokens": ended.prompt_tokens,
        "rollout.tokens": ended.tokens,
        "rollout.decoding_steps": ended.decoding_steps,
        "rollout.draft_tokens": ended.draft_tokens,
        "rollout.accepted_tokens": ended.accepted_tokens,
        **_known("rollout.oldest_weight_version", ended.oldest_version),
        **_known("rollout.newest_weight_version", ended.newest_version),
    }
    attributes = common | outcome | counts
    return [
        _child(trace, QUEUE_SPAN, ended.sample, ended.arrived_at, started_at, common),
        _child(trace, SAMPLE_SPAN, ended.sample, started_at, finished_at, attributes, has_failed),
    ]


def span_of_request(trace: RequestTrace, last: EndedRollout, *, has_failed: bool) -> SpanData:
    """Return the span of a request; *last* is the rollout that ended last."""
    finished_at = max(last.arrived_at, last.finished_at)
    attributes = _request_attributes(last)
    return SpanData(REQUEST_SPAN, trace, trace.span_id, last.arrived_at, finished_at, attributes, has_failed)


def span_of_append(trace: RequestTrace, rollout_id: RolloutId, ended_at: float, appended_at: float) -> SpanData:
    """Return the span of a rollout's way into the history.

    Args:
        trace: trace of the request.
        rollout_id: id of the rollout.
        ended_at: Unix time at which it ended.
        appended_at: Unix time at which the history contained it.
    """
    attributes: dict[str, AttributeValue] = {
        "rollout.request_id": rollout_id.request_id,
        "rollout.sample": rollout_id.sample,
        "rollout.turn": rollout_id.turn,
    }
    return _child(trace, APPEND_SPAN, rollout_id.sample, ended_at, max(ended_at, appended_at), attributes)


def _child(
    trace: RequestTrace,
    name: str,
    sample: int,
    started_at: float,
    ended_at: float,
    attributes: Mapping[str, AttributeValue],
    has_failed: bool = False,
) -> SpanData:
    span_id = span_id_of(f"{trace.span_id:x}", name, sample)
    return SpanData(name, trace, span_id, started_at, ended_at, attributes, has_failed)


def _request_attributes(ended: EndedRollout) -> dict[str, AttributeValue]:
    return {
        "rollout.request_id": ended.request_id,
        "rollout.problem_id": ended.problem_id,
        "rollout.purpose": ended.purpose,
        "rollout.turn": ended.turn,
        **_known("rollout.step", ended.step),
    }


def _known(name: str, value: int | None) -> dict[str, AttributeValue]:
    return {} if value is None else {name: value}


def is_tracing_requested(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the standard environment variables of OpenTelemetry ask for traces."""
    return (
        any(environment.get(name) for name in ENDPOINT_VARIABLES)
        and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and "otlp" in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").replace(" ", "").split(",")
    )


class TraceExporter:
    """Sends spans to an OpenTelemetry collector, as the standard environment variables say.

    The SDK sends them in batches from a thread of its own, so that a slow collector never delays the caller. It drops
    and logs what the collector does not accept in time.
    """

    def __init__(self, service: str, job: str, job_uid: str) -> None:
        """Load the SDK.

        Args:
            service: the part of the job that sends the spans.
            job: ``namespace/name`` of the job.
            job_uid: uid of the job.

        Raises:
            ValueError: if the environment names an unknown protocol or has another unusable setting.
        """
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        class GivenIds(IdGenerator):
            """Gives each span the ids that were set before."""

            trace_id = span_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

            def generate_span_id(self) -> int:
                return self.span_id

        resource = Resource.create({"rollout.job": job, "rollout.job_uid": job_uid})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _DEFAULT_SERVICE_NAME}))
        self._ids = GivenIds()
        self._provider: TracerProvider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        # A step may end with more spans than the SDK keeps by default.
        waiting = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING_SPANS))
        self._provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(), max_queue_size=waiting))
        self._tracer = self._provider.get_tracer(f"das-rollout.{service}")

    @classmethod
    def from_environment(cls, service: str, job: str, job_uid: str) -> TraceExporter | None:
        """Return an exporter, or None if the environment asks for no traces or has unusable settings."""
        if not is_tracing_requested():
            return None
        try:
            return cls(service, job, job_uid)
        except Exception as error:  # a job runs without traces
            variables = " or ".join(ENDPOINT_VARIABLES)
            logger.error("There are no traces, although %s is set: %s: %s", variables, type(error).__name__, error)
            return None

    def export(self, spans: Iterable[SpanData]) -> None:
        """Send spans soon."""
        from opentelemetry.trace import SpanKind, StatusCode

        for data in spans:
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

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        # The SDK's own timeout of 30 seconds cannot be changed.
        flushing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        flushing.start()
        flushing.join(TRACE_FLUSH_TIMEOUT_S)

    def _request(self, request: RequestTrace, caller: Context) -> Context:
        """Return the context of the children of a request's span.

        The span may come from another process, or later. The sampler therefore decides here, too, whether it is
        recorded; the decision of the standard samplers depends on the trace id and the caller alone.
        """
        decision = self._provider.sampler.should_sample(caller, request.trace_id, REQUEST_SPAN).decision
        return _context(request.trace_id, request.span_id, decision.is_sampled())


def _caller(request: RequestTrace) -> Context:
    """Return the context of the caller of a request; an empty one if there is none."""
    from opentelemetry.context import Context

    if not request.caller_span_id:
        return Context()
    return _context(request.trace_id, request.caller_span_id, request.caller_sampled)


def _context(trace_id: int, span_id: int, is_sampled: bool) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    span = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
    return set_span_in_context(span, Context())


def _otlp_exporter() -> SpanExporter:
    """Return the exporter for the protocol that the environment names.

    Raises:
        ValueError: if the protocol is unknown.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(_PROTOCOL_VARIABLE)
    if protocol in (None, "", "http/protobuf"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    raise ValueError(f"{_PROTOCOL_VARIABLE} is {protocol!r}; use http/protobuf or grpc")
