"""Sends spans to an OpenTelemetry collector from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rollout_worker.job.limits import FAILURE_LOG_INTERVAL_S, MAX_WAITING_SPANS, TRACE_FLUSH_TIMEOUT_S
from rollout_worker.job.tracing.spans import SpanData

if TYPE_CHECKING:
    from rollout_worker.job.tracing.sdk import SpanSender

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables of which one must be set, or else there are no traces."""


def is_tracing_requested(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the standard environment variables of OpenTelemetry ask for traces."""
    return (
        any(environment.get(name) for name in ENDPOINT_VARIABLES)
        and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and "otlp" in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").replace(" ", "").split(",")
    )


class TraceExporter:
    """A thread that sends spans with OpenTelemetry's SDK, which only this thread imports.

    It begins with the first span, because the SDK loads slowly while others wait for the start of the job. It never
    delays its caller. Spans that the collector does not accept in time are dropped.
    """

    def __init__(self, service: str, job: str, job_uid: str) -> None:
        """Create an exporter that one thread uses.

        Args:
            service: the part of the job that sends the spans.
            job: ``namespace/name`` of the job.
            job_uid: uid of the job.
        """
        self._service = service
        self._resource = {"rollout.job": job, "rollout.job_uid": job_uid}
        self._spans: queue.Queue[SpanData | None] = queue.Queue(MAX_WAITING_SPANS)
        """Spans to send; None ends the thread."""
        self._dropping_logged_at = -FAILURE_LOG_INTERVAL_S
        self._sender: SpanSender | None = None
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._has_started = False

    @classmethod
    def from_environment(cls, service: str, job: str, job_uid: str) -> TraceExporter | None:
        """Return an exporter if the environment asks for traces, else None."""
        return cls(service, job, job_uid) if is_tracing_requested() else None

    def export(self, spans: Iterable[SpanData]) -> None:
        """Send spans soon."""
        if not self._has_started:
            self._has_started = True
            self._thread.start()
        if not self._thread.is_alive():
            return
        try:
            for span in spans:
                self._spans.put_nowait(span)
        except queue.Full:
            now = time.monotonic()
            if now - self._dropping_logged_at >= FAILURE_LOG_INTERVAL_S:
                self._dropping_logged_at = now
                logger.warning("The collector of traces is too slow: spans are dropped.")

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most, and not at all if the collector has failed last."""
        if not self._has_started or (self._sender is not None and self._sender.has_failed):
            return
        with contextlib.suppress(queue.Full):  # such a collector is too slow anyway
            self._spans.put_nowait(None)
            self._thread.join(TRACE_FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        try:
            from rollout_worker.job.tracing.sdk import SpanSender

            self._sender = sender = SpanSender(self._service, self._resource)
        except Exception as error:  # settings of the SDK, too, may be invalid; a job runs without traces
            logger.error(
                "There are no traces, although %s is set: %s: %s",
                " or ".join(ENDPOINT_VARIABLES),
                type(error).__name__,
                error,
            )
            return
        while (span := self._spans.get()) is not None:
            sender.send(span)
        sender.close()
