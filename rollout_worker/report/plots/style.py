"""Colors and layout that all plots share."""

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
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "hoverlabel": {"align": "left"},
            "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False},
            "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False, "rangemode": "tozero"},
            **layout,
        },
    )


def escaped(text: str) -> str:
    """Return text for a label of a plot, where Plotly would interpret some HTML tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def steps_axis(numbers: Sequence[int]) -> dict[str, Any]:
    """Return the settings of an axis of training steps, which has a tick for each of a few steps."""
    return {"tickmode": "array", "tickvals": list(numbers)} if len(numbers) <= 20 else {}


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of the unit, and its name, in which a time axis of *seconds* is labeled."""
    if seconds < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")
