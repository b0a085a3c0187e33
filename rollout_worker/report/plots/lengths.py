"""Lengths of rollouts: by step, by problem with predictions, and the calibration of the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles

import plotly.graph_objects as go

from rollout_worker.report.analysis.lengths import by_generation, calibration, predictions
from rollout_worker.report.analysis.steps import Step
from rollout_worker.report.plots.style import BLUE, GRAY, GREEN, ORANGE, RED, figure, steps_axis
from rollout_worker.report.recording import PastLength


def lengths_by_step(steps: Sequence[Step], unit: str) -> go.Figure:
    """Lines of the quantiles of the lengths of each step's rollouts."""
    numbers = [step.number for step in steps]
    lengths = [sorted(one.rollout.tokens for one in step.sampled) or [0] for step in steps]
    deciles = [quantiles(one, n=10, method="inclusive") if len(one) > 1 else one * 9 for one in lengths]
    lines = [
        ("longest", [one[-1] for one in lengths], RED, "dot"),
        ("90 %", [one[8] for one in deciles], ORANGE, "solid"),
        ("median", [one[4] for one in deciles], BLUE, "solid"),
        ("10 %", [one[0] for one in deciles], GREEN, "solid"),
    ]
    traces = [
        go.Scatter(
            name=name,
            x=numbers,
            y=values,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate=f"{name}: %{{y:,.0f}} tokens<extra></extra>",
        )
        for name, values, color, dash in lines
    ]
    return figure(traces, x=unit, y="tokens", xaxis={"title": {"text": unit}, **steps_axis(numbers)})


def lengths_of_problem(entries: Sequence[PastLength]) -> go.Figure:
    """The lengths of a problem's rollouts in each generation, and the quantiles that earlier ones had predicted."""
    groups = [
        ("ended by itself", [entry for entry in entries if not entry.cut_off], "circle", BLUE),
        ("cut off", [entry for entry in entries if entry.cut_off], "triangle-up", RED),
    ]
    traces = [
        go.Scatter(
            name=name,
            x=[entry.generation + _offset(index, len(group)) for index, entry in enumerate(group)],
            y=[entry.length for entry in group],
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 7, "opacity": 0.7},
            customdata=["no reward" if entry.reward is None else f"reward {entry.reward:.3g}" for entry in group],
            hovertemplate="%{y:,} tokens, %{customdata}<extra></extra>",
        )
        for name, group, symbol, color in groups
        if group
    ]
    predicted = predictions(entries)
    for name, values, dash in (
        ("predicted 90 %", [one.high for one in predicted], "dash"),
        ("predicted median", [one.median for one in predicted], "solid"),
        ("predicted 10 %", [one.low for one in predicted], "dash"),
    ):
        traces.append(
            go.Scatter(
                name=name,
                x=[one.generation for one in predicted],
                y=values,
                mode="lines+markers",
                marker={"symbol": "line-ew-open", "size": 14},
                line={"color": ORANGE, "dash": dash, "width": 1.5},
                hovertemplate=f"{name}: %{{y:,.0f}} tokens<extra></extra>",
            )
        )
    generations = list(by_generation(entries))
    return figure(
        traces,
        x="generation",
        y="tokens",
        xaxis={"title": {"text": "generation"}, **steps_axis(generations)},
    )


def calibration_plot(lengths: Mapping[str, Sequence[PastLength]]) -> go.Figure:
    """How often lengths were at most each predicted quantile; on the diagonal, predictions are right."""
    points = calibration(lengths)
    traces = [
        go.Scatter(
            name="ideal",
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            line={"color": GRAY, "dash": "dot", "width": 1.5},
            hoverinfo="skip",
        ),
        go.Scatter(
            name="all problems",
            x=[one.predicted for one in points],
            y=[one.observed for one in points],
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
            customdata=[one.count for one in points],
            hovertemplate="%{y:.0%} of %{customdata:,} rollouts were at most as long as the predicted quantile of "
            "%{x:.0%}<extra></extra>",
        ),
    ]
    share = {"tickformat": ".0%", "range": [0, 1.02], "automargin": True}
    return figure(
        traces,
        x="predicted probability",
        y="observed share",
        xaxis={"title": {"text": "predicted probability"}, **share},
        yaxis={"title": {"text": "observed share"}, **share},
    )


def _offset(index: int, count: int) -> float:
    """Return by how much a point is moved sideways, so that rollouts of equal length are visible."""
    return 0.0 if count < 2 else ((index * 7) % 15 - 7) / 60
