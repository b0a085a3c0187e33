"""Colors, layout and kinds of traces that the plots of a report share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from rollout_api.protocol.messages import DraftMode

# The hues of Okabe and Ito, which people with color vision deficiencies can tell apart, with a lightness that has
# enough contrast on white and on black.
BLUE, ORANGE, GREEN, PURPLE, RED, GRAY = "#2f80c9", "#c77700", "#0f9070", "#b060a0", "#d5502a", "#7f8793"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, GRAY)

MODE_COLORS: dict[str, str] = {DraftMode.HISTORY: BLUE, DraftMode.OWN_TEXT: ORANGE, DraftMode.OFF: GRAY}
SOURCE_COLORS = {"history": BLUE, "self": ORANGE, "siblings": GREEN, "cross_problem": PURPLE}
SOURCE_NAMES = {
    "history": "history",
    "self": "own text",
    "siblings": "siblings",
    "cross_problem": "cross-problem pool",
}


@dataclass(frozen=True)
class Variant:
    """One of the figures between which the reader of a plot can choose."""

    label: str
    figure: go.Figure


@dataclass(frozen=True)
class Plot:
    """A plot with its heading and a sentence on how to read it."""

    name: str
    """Identifies the plot in the page."""
    title: str
    explanation: str
    variants: list[Variant]
    choice: str = ""
    """What the variants differ in, such as ``epoch``."""
    initial: int = 0
    """Index of the variant that is shown at first."""
    wide: bool = True
    """Whether it takes the whole width of the page."""


def figure(traces: Sequence[Any], *, x: str, y: str, height: int = 320, **layout: Any) -> go.Figure:
    """Return a figure whose colors of text, grid and background the page sets for its light or dark theme."""
    return go.Figure(
        data=traces,
        layout={
            "template": {},
            "height": height,
            "margin": {"l": 60, "r": 16, "t": 8, "b": 48},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "hoverlabel": {"align": "left"},
            "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False},
            "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False, "rangemode": "tozero"},
            **layout,
        },
    )


def line(name: str, x: Sequence[Any], y: Sequence[Any], hover: str, **settings: Any) -> go.Scatter:
    """Return a line; *settings* are those of Plotly, and the keys of ``line`` among them can be given directly."""
    style = {key: settings.pop(key) for key in ("color", "width", "dash", "shape") if key in settings}
    return go.Scatter(
        name=name, x=x, y=y, line={"width": 2, **style}, hovertemplate=hover, **{"mode": "lines+markers", **settings}
    )


def bars(name: str, x: Sequence[Any], y: Sequence[Any], hover: str, color: str, **settings: Any) -> go.Bar:
    """Return bars; *settings* are those of Plotly."""
    return go.Bar(name=name, x=x, y=y, hovertemplate=hover, **{"marker": {"color": color}, **settings})


def shade(x0: float, x1: float, color: str, **settings: Any) -> dict[str, Any]:
    """Return a shape that shades the time from *x0* to *x1*; *settings* are those of Plotly."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": x0,
        "x1": x1,
        "y0": 0,
        "y1": 1,
        "fillcolor": color,
        "line": {"width": 0},
        **settings,
    }


def escaped(text: str) -> str:
    """Return text for a label of a plot, where Plotly would interpret some HTML tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def second_axis(title: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a vertical axis at the right side."""
    return {
        "title": {"text": title},
        "side": "right",
        "rangemode": "tozero",
        "tickmode": "auto",
        "showgrid": False,
        "automargin": True,
        **settings,
    }


def numbers_axis(title: str, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the settings of an axis of whole numbers, such as steps, which has a tick for each of a few numbers."""
    ticks = {"tickmode": "array", "tickvals": list(numbers)} if len(numbers) <= 20 else {}
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **ticks}


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit for labeling a time axis of *seconds*."""
    if seconds < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")
