"""The OpenTelemetry span to which a request belongs, as text in the format of W3C Trace Context."""

from __future__ import annotations

import re
import sys

_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?![0-9a-f])")


def current_traceparent() -> str | None:
    """Return the ``traceparent`` of the active span; None if there is none.

    This never imports OpenTelemetry: a process that has an active span has done so itself.
    """
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers.get("traceparent")


def parse_traceparent(header: str) -> str | None:
    """Return the HTTP header ``traceparent`` in version 00 of its format; None if it is missing or invalid."""
    parsed = _HEADER.match(header)
    return None if parsed is None else "-".join(["00", *parsed.groups()])
