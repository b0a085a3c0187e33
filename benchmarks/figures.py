"""How a benchmark writes down what it found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """One promise and what was measured."""

    name: str
    value: float
    unit: str
    peer: str
    """What it was measured against, in the same run; empty: nothing."""
    op: Literal[">=", "<="]
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.op == ">=" else self.value <= self.target


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least *share* of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def report(file: Path | None, figures: Sequence[Figure], **details: Any) -> None:
    """Print figures, and write them with all *details* to *file*."""
    for figure in figures:
        target = "" if figure.target is None else f"  (target {figure.op} {figure.target:g}: {_verdict(figure)})"
        against = f", against {figure.peer}" if figure.peer else ""
        print(f"{figure.name}: {figure.value:.4g} {figure.unit}{against}{target}")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"figures": [asdict(figure) for figure in figures], **details}, indent=1) + "\n")


def _verdict(figure: Figure) -> str:
    return "met" if figure.met else "missed"
