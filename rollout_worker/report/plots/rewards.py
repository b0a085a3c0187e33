"""Rewards and staleness by step."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rollout_api.protocol.timeline import Measurement
from rollout_worker.report.analysis.rewards import StepRewards
from rollout_worker.report.analysis.staleness import PublishedVersions, staleness_of
from rollout_worker.report.analysis.steps import Step
from rollout_worker.report.plots.style import BLUE, GRAY, ORANGE, SERIES, figure, steps_axis

_MAX_STALENESS = 4
"""Staleness from which rollouts are counted together."""


def rewards_by_step(rewards: Sequence[tuple[int, StepRewards]], unit: str) -> go.Figure:
    """The mean reward of each step, and the share of its groups whose rewards are all equal."""
    numbers = [number for number, _ in rewards]
    traces = [
        go.Scatter(
            name="mean reward",
            x=numbers,
            y=[one.mean for _, one in rewards],
            error_y={"type": "data", "array": [one.error for _, one in rewards], "color": BLUE, "thickness": 1},
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
            hovertemplate="mean reward %{y:.3f}<extra></extra>",
        ),
        go.Scatter(
            name="groups with equal rewards",
            x=[number for number, one in rewards if one.equal_groups is not None],
            y=[one.equal_groups for _, one in rewards if one.equal_groups is not None],
            yaxis="y2",
            mode="lines+markers",
            line={"color": ORANGE, "width": 1.5, "dash": "dot"},
            hovertemplate="%{y:.0%} of the groups have equal rewards<extra></extra>",
        ),
    ]
    return figure(
        traces,
        x=unit,
        y="mean reward",
        xaxis={"title": {"text": unit}, **steps_axis(numbers)},
        yaxis={"title": {"text": "mean reward"}, "automargin": True, "zeroline": False},
        yaxis2={
            "title": {"text": "share of the groups"},
            "overlaying": "y",
            "side": "right",
            "tickformat": ".0%",
            "range": [0, 1.02],
            "showgrid": False,
            "automargin": True,
        },
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
                go.Bar(
                    name=name,
                    x=numbers,
                    y=values,
                    marker={"color": SERIES[staleness] if staleness else GRAY},
                    hovertemplate=f"staleness {name}: %{{y:.0%}} of the rollouts<extra></extra>",
                )
            )
    return figure(
        traces,
        x=unit,
        y="share of the rollouts",
        barmode="stack",
        showlegend=True,
        xaxis={"title": {"text": unit}, **steps_axis(numbers)},
        yaxis={"title": {"text": "share of the rollouts"}, "tickformat": ".0%", "automargin": True},
    )
