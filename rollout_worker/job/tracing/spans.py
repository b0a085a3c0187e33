"""The spans of a request, made after the fact from what the job has recorded about its rollouts.

A span has times, ids and counts, but never a prompt or a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_api.protocol.messages import FinishReason, RolloutId
from rollout_api.protocol.timeline import EndedRollout
from rollout_worker.job.request_trace import RequestTrace, span_id_of

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
    """Return the span of a request, of which *last* is the rollout that ended last."""
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
