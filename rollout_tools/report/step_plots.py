"""Plots of the training steps: makespans, running rollouts, Gantt charts, rewards and staleness."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rollout_api.protocol.timeline import Measurement
from rollout_tools.report.steps import (
    Comparison,
    PublishedVersions,
    RunningCount,
    Scored,
    Slowdown,
    Step,
    StepRewards,
    intervals_without_drafts,
    makespan_without_drafts,
    mode_name,
    running_counts,
    staleness_of,
    thinned,
)
from rollout_tools.report.style import (
    BLUE,
    GRAY,
    MODE_COLORS,
    ORANGE,
    RED,
    SERIES,
    bars,
    escaped,
    figure,
    line,
    numbers_axis,
    second_axis,
    shade,
    time_unit,
)

MAX_BARS = 2000
"""Number of rollouts that are drawn of one step, so that the page stays fast."""
_MAX_STALENESS = 4
"""Rollouts of this staleness or more are counted together."""


def makespans(comparisons: Sequence[Comparison], by_engine: Mapping[str, Slowdown], unit: str) -> go.Figure:
    """Bars of the makespan of each step, with its tail, its measured baselines, and the estimate without drafts."""
    numbers = [one.step.number for one in comparisons]
    tails = [one.step.tail for one in comparisons]
    bodies = [one.step.makespan - tail for one, tail in zip(comparisons, tails, strict=True)]
    traces = [
        bars(
            "with drafts",
            numbers,
            bodies,
            "with drafts: %{customdata:.1f} s<extra></extra>",
            BLUE,
            offsetgroup="measured",
            customdata=[one.step.makespan for one in comparisons],
        ),
        bars(
            "of which tail", numbers, tails, "tail: %{y:.1f} s<extra></extra>", RED, base=bodies, offsetgroup="measured"
        ),
    ]
    for mode in sorted({mode for one in comparisons for mode in one.baselines}, reverse=True):
        measured = [(one.step.number, one.baselines[mode].makespan) for one in comparisons if mode in one.baselines]
        traces.append(
            bars(
                f"{mode_name(mode)}, measured",
                [number for number, _ in measured],
                [seconds for _, seconds in measured],
                f"{mode_name(mode)}: %{{y:.1f}} s, measured<extra></extra>",
                MODE_COLORS.get(mode, ORANGE),
                offsetgroup=mode,
            )
        )
    estimates = [(one.step.number, makespan_without_drafts(one.step, dict(by_engine))) for one in comparisons]
    known = [(number, seconds) for number, seconds in estimates if seconds is not None]
    if known:
        traces.append(
            bars(
                "no drafts, estimated",
                [number for number, _ in known],
                [seconds for _, seconds in known],
                "without drafts: about %{y:.1f} s, by the cost model<extra></extra>",
                GRAY,
                marker={"color": GRAY, "opacity": 0.6, "pattern": {"shape": "/"}},
                offsetgroup="estimated",
            )
        )
    return figure(
        traces,
        x=unit,
        y="makespan (seconds)",
        barmode="group",
        xaxis=numbers_axis(unit, numbers),
    )


def running_in_step(comparison: Comparison, by_engine: Mapping[str, Slowdown]) -> go.Figure:
    """Lines of the running rollouts since the start of a step."""
    step = comparison.step
    lines: list[tuple[str, list[RunningCount], dict[str, Any]]] = [
        ("with drafts", _since_start(step), {"color": BLUE, "width": 2.5})
    ]
    for mode, baseline in comparison.baselines.items():
        color = MODE_COLORS.get(mode, ORANGE)
        lines.append((f"{mode_name(mode)}, measured", _since_start(baseline), {"color": color, "width": 1.5}))
    if by_engine:
        estimated = running_counts(intervals_without_drafts(step, dict(by_engine)))
        lines.append(("no drafts, estimated", estimated, {"color": GRAY, "width": 2, "dash": "dot"}))
    scale, unit = time_unit(max((counts[-1].time for _, counts, _ in lines if counts), default=0.0))
    traces = [
        line(
            name,
            [one.time / scale for one in thinned(counts)],
            [one.count for one in thinned(counts)],
            f"%{{y}} running after %{{x:.1f}} {unit}<extra>{name}</extra>",
            mode="lines",
            shape="hv",
            **style,
        )
        for name, counts, style in lines
    ]
    tail = shade(
        (step.tail_start - step.start) / scale,
        step.makespan / scale,
        RED,
        opacity=0.12,
        label={"text": "tail", "textposition": "top left", "font": {"color": RED}},
    )
    return figure(
        traces, x=f"{unit} since the first request", y="running rollouts", shapes=[tail], xaxis_rangemode="tozero"
    )


def running_in_job(steps: Sequence[Step], measurements: Sequence[Measurement]) -> go.Figure:
    """Lines of the running and the waiting rollouts of the whole job."""
    start = min(step.start for step in steps)
    end = max(step.end for step in steps)
    scale, unit = time_unit(end - start)
    traces = []
    for mode in sorted({step.draft_mode for step in steps}):
        intervals = [one for step in steps if step.draft_mode == mode for one in step.intervals]
        counts = thinned(running_counts(intervals))
        traces.append(
            line(
                f"running, {mode_name(mode)}",
                [(one.time - start) / scale for one in counts],
                [one.count for one in counts],
                "%{y} running<extra></extra>",
                shape="hv",
                color=MODE_COLORS.get(mode, ORANGE),
                width=1.5,
                mode="lines",
                fill="tozeroy",
            )
        )
    traces.append(
        line(
            "waiting",
            [(one.time - start) / scale for one in measurements],
            [one.waiting for one in measurements],
            "%{y} waiting<extra></extra>",
            shape="hv",
            color=RED,
            width=1,
            dash="dot",
            mode="lines",
        )
    )
    return figure(traces, x=f"{unit} since the first request", y="rollouts")


def _since_start(step: Step) -> list[RunningCount]:
    return [replace(one, time=one.time - step.start) for one in step.running]


class Bar(NamedTuple):
    """A rollout in a row of its engine."""

    row: int
    """Row, counted over all engines from 0."""
    scored: Scored


@dataclass(frozen=True)
class EngineRows:
    """The rows of one engine."""

    engine: str
    first: int
    count: int


def arrange(step: Step, most: int) -> tuple[list[Bar], list[EngineRows]]:
    """Arrange the rollouts of a step in rows per engine, each in the first row that is free.

    Of more than *most* rollouts, those that ran the longest are returned.
    """
    longest = sorted(step.sampled, key=lambda one: one.started - one.rollout.finished_at)[:most]
    by_engine: defaultdict[str, list[Scored]] = defaultdict(list)
    for one in longest:
        by_engine[one.rollout.engine_name].append(one)
    arranged: list[Bar] = []
    engines: list[EngineRows] = []
    first = 0
    for engine in sorted(by_engine):
        rows = _rows(by_engine[engine])
        count = max(rows) + 1
        ordered = sorted(by_engine[engine], key=lambda one: one.started)
        arranged += [Bar(first + row, one) for row, one in zip(rows, ordered, strict=True)]
        engines.append(EngineRows(engine, first, count))
        first += count
    return arranged, engines


def _rows(rollouts: Sequence[Scored]) -> list[int]:
    """Return the row of each rollout, in the order of their starts."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = []
    for one in sorted(rollouts, key=lambda one: one.started):
        while busy and busy[0][0] <= one.started:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (one.rollout.finished_at, row))
        rows.append(row)
    return rows


def gantt(step: Step) -> go.Figure:
    """A bar for each rollout, in rows per engine."""
    arranged, engines = arrange(step, MAX_BARS)
    scale, unit = time_unit(step.makespan)
    kinds: dict[str, tuple[list[Bar], str]] = {
        "ended before the tail": ([], BLUE),
        "ran in the tail": ([], RED),
        "cut off at max_tokens": ([], ORANGE),
        "interrupted": ([], GRAY),
    }
    for bar in arranged:
        kinds[_kind(bar, step.tail_start)][0].append(bar)
    traces = [
        bars(
            name,
            [(bar.scored.rollout.finished_at - bar.scored.started) / scale for bar in kind],
            [bar.row for bar in kind],
            "%{customdata}<extra></extra>",
            color,
            orientation="h",
            base=[(bar.scored.started - step.start) / scale for bar in kind],
            width=0.8,
            marker={"color": color, "line": {"width": 0}},
            customdata=[_details(bar) for bar in kind],
        )
        for name, (kind, color) in kinds.items()
        if kind
    ]
    rows = sum(engine.count for engine in engines)
    lines = [_line(engine.first - 0.5) for engine in engines[1:]]
    tail = shade((step.tail_start - step.start) / scale, step.makespan / scale, RED, opacity=0.1, layer="below")
    return figure(
        traces,
        x="",
        y="",
        height=min(900, max(280, 110 + 11 * rows)),
        barmode="overlay",
        hovermode="closest",
        shapes=[tail, *lines],
        xaxis={
            "title": {"text": f"{unit} since the first request"},
            "range": [0, 1.01 * step.makespan / scale],
            "automargin": True,
        },
        yaxis={
            "tickmode": "array",
            "tickvals": [engine.first + (engine.count - 1) / 2 for engine in engines],
            "ticktext": [escaped(engine.engine) for engine in engines],
            "range": [rows - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )


def drawn_note(steps: Sequence[Step]) -> str:
    """Return a sentence on rollouts that are not drawn; empty if all are."""
    if all(len(step.sampled) <= MAX_BARS for step in steps):
        return ""
    return f" Of a step with more than {MAX_BARS:,} rollouts, those that ran the longest are drawn."


def _kind(bar: Bar, tail: float) -> str:
    if bar.scored.cut_off:
        return "cut off at max_tokens"
    if bar.scored.rollout.finish_reason != "stop":
        return "interrupted"
    return "ran in the tail" if bar.scored.rollout.finished_at > tail else "ended before the tail"


def _details(bar: Bar) -> str:
    rollout = bar.scored.rollout
    steps = max(1, rollout.decoding_steps)
    lines = [
        f"problem {rollout.problem_id[:40]}, sample {rollout.sample}",
        f"{rollout.tokens:,} tokens in {rollout.finished_at - bar.scored.started:.2f} s, {rollout.finish_reason}",
        f"{rollout.accepted_tokens / steps:.2f} accepted per step",
        f"{rollout.accepted_tokens:,} of {rollout.draft_tokens:,} draft tokens accepted",
    ]
    if rollout.length_class:
        lines.append(f"length class {rollout.length_class}")
    if bar.scored.reward is not None:
        lines.append(f"reward {bar.scored.reward:.3g}")
    return "<br>".join(map(escaped, lines))


def _line(y: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"color": GRAY, "width": 1, "dash": "dot"},
    }


def rewards_by_step(rewards: Sequence[tuple[int, StepRewards]], unit: str) -> go.Figure:
    """The mean reward of each step, and the share of its groups whose rewards are all equal."""
    numbers = [number for number, _ in rewards]
    traces = [
        line(
            "mean reward",
            numbers,
            [one.mean for _, one in rewards],
            "mean reward %{y:.3f}<extra></extra>",
            color=BLUE,
            error_y={"type": "data", "array": [one.error for _, one in rewards], "color": BLUE, "thickness": 1},
        ),
        line(
            "groups with equal rewards",
            [number for number, one in rewards if one.equal_groups is not None],
            [one.equal_groups for _, one in rewards if one.equal_groups is not None],
            "%{y:.0%} of the groups have equal rewards<extra></extra>",
            color=ORANGE,
            width=1.5,
            dash="dot",
            yaxis="y2",
        ),
    ]
    return figure(
        traces,
        x=unit,
        y="mean reward",
        xaxis=numbers_axis(unit, numbers),
        yaxis={"title": {"text": "mean reward"}, "automargin": True, "zeroline": False},
        yaxis2=second_axis("share of the groups", overlaying="y", tickformat=".0%", range=[0, 1.02]),
        margin={"l": 60, "r": 60, "t": 8, "b": 48},
    )


def staleness_by_step(steps: Sequence[Step], measurements: Sequence[Measurement], unit: str) -> go.Figure:
    """Stacked bars of the shares of rollouts with each staleness."""
    published = PublishedVersions(measurements)
    counts = [staleness_of(step, published) for step in steps]
    numbers = [step.number for step in steps]
    traces = []
    for staleness in range(_MAX_STALENESS + 1):
        last = staleness == _MAX_STALENESS
        values = [
            sum(number for one, number in count.items() if (one >= staleness if last else one == staleness))
            / max(1, count.total())
            for count in counts
        ]
        if any(values):
            name = f"{staleness} or more" if last else str(staleness)
            traces.append(
                bars(
                    name,
                    numbers,
                    values,
                    f"staleness {name}: %{{y:.0%}} of the rollouts<extra></extra>",
                    SERIES[staleness] if staleness else GRAY,
                )
            )
    return figure(
        traces,
        x=unit,
        y="share of the rollouts",
        barmode="stack",
        showlegend=True,
        xaxis=numbers_axis(unit, numbers),
        yaxis={"title": {"text": "share of the rollouts"}, "tickformat": ".0%", "automargin": True},
    )
