"""Figures that a benchmark reports, and the files for its results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class Figure:
    """One measured value, with the target it has to meet."""

    name: str
    value: float
    unit: str
    peer: str
    """What the value is relative to, measured in the same run; empty if there is no peer."""
    op: Literal[">=", "<="]
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.op == ">=" else self.value <= self.target


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least *share* of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def report(file: Path | None, figures: Sequence[Figure], **details: Any) -> None:
    """Print the figures and, if *file* is given, write them there together with *details*."""
    for figure in figures:
        target = "" if figure.target is None else f"  (target {figure.op} {figure.target:g}: {_verdict(figure)})"
        against = f", against {figure.peer}" if figure.peer else ""
        print(f"{figure.name}: {figure.value:.4g} {figure.unit}{against}{target}")
    if file is not None:
        write_figures(file, figures, **details)


def write_figures(file: Path, figures: Sequence[Figure], **details: Any) -> None:
    """Replace *file* by a JSON object with the list ``figures`` and the *details*."""
    _write_results(file, {"figures": [asdict(figure) for figure in figures], **details})


def _write_results(file: Path, results: Mapping[str, Any]) -> None:
    """Replace *file* by a JSON object of *results*: one line per list element or column, six significant digits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    lines = (f"{json.dumps(key)}: {_as_json(_rounded(value))}" for key, value in results.items())
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(file)


def save_svg(canvas: Canvas, file: Path) -> None:
    """Write a matplotlib figure as SVG, without a date."""
    file.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(file, metadata={"Date": None})
    file.write_text(compact_svg(file.read_text()))


def compact_svg(drawing: str) -> str:
    """Return a drawing of matplotlib with one line for each of its outer groups."""
    return re.sub(r"\s*\n(?! {0,2}<g )\s*", " ", drawing).rstrip() + "\n"


def to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows that have the same keys as one list per key, which takes a fifth of the space in JSON."""
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows that :func:`to_columns` was given."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_json(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n " + ",\n ".join(json.dumps(element) for element in value) + "\n]"
    if isinstance(value, dict) and value and all(isinstance(element, list) for element in value.values()):
        columns = (f"{json.dumps(key)}: {json.dumps(element)}" for key, element in value.items())
        return "{\n " + ",\n ".join(columns) + "\n}"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(element) for element in value]
    return value


def _verdict(figure: Figure) -> str:
    return "met" if figure.met else "missed"
