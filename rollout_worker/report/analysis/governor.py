"""What the governor of each engine decided, and the cost model behind it, over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout_api.protocol.timeline import Measurement
from rollout_worker.report.analysis.without_drafts import timed_steps


class EngineHistory(NamedTuple):
    """One engine over time; all lists but the last two have an entry for each measurement of the engine."""

    times: list[float]
    """Unix times."""
    disabled: list[bool]
    """Whether drafting was disabled."""
    stops: list[float]
    """How often drafting has been disabled so far."""
    trial_tokens: list[float]
    """Tokens of trials so far."""
    base_ms: list[float]
    """Constant part of a verification step, by the cost model, in milliseconds."""
    token_ms: list[float]
    """Time per verified token, by the cost model, in milliseconds."""
    saved_times: list[float]
    saved: list[float]
    """Share of the decoding time that drafting has saved up to each of these times since the one before."""


_MAX_POINTS = 600
"""Number of measurements of which the decisions are returned, so that plots of many engines stay small."""


def engine_histories(measurements: Sequence[Measurement]) -> dict[str, EngineHistory]:
    """Return the decisions on each engine, by its name, at a limited number of times."""
    histories: dict[str, EngineHistory] = {}
    measurements = measurements[:: -(-len(measurements) // _MAX_POINTS) or 1]
    for measurement in measurements:
        for engine in measurement.engines:
            history = histories.setdefault(engine.name, EngineHistory([], [], [], [], [], [], [], []))
            history.times.append(measurement.time)
            history.disabled.append(engine.drafting_disabled > 0)
            history.stops.append(engine.drafting_stops)
            history.trial_tokens.append(engine.trial_tokens)
            history.base_ms.append(engine.cost_base_seconds * 1e3)
            history.token_ms.append(engine.cost_token_seconds * 1e3)
    for name, parts in timed_steps(measurements).items():
        for steps in parts:
            histories[name].saved_times.append(steps.end)
            without = steps.without_drafts
            histories[name].saved.append(1 - steps.seconds / without if without > 0 else 0.0)
    return dict(sorted(histories.items()))


def disabled_spans(history: EngineHistory) -> list[tuple[float, float]]:
    """Return the times in which drafting was disabled, each up to the first measurement in which it was not."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for time, disabled in zip(history.times, history.disabled, strict=True):
        if disabled and begin is None:
            begin = time
        elif not disabled and begin is not None:
            spans.append((begin, time))
            begin = None
    if begin is not None:
        spans.append((begin, history.times[-1]))
    return spans
