"""The rollouts of a step as bars: when each ran on which engine, without overlaps."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout_worker.report.analysis.steps import Scored, Step


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

    Args:
        step: the step.
        most: maximum number of rollouts; of more of them, those that ran the longest are returned.
    """
    longest = sorted(step.sampled, key=lambda one: one.started - one.rollout.finished_at)[:most]
    by_engine: defaultdict[str, list[Scored]] = defaultdict(list)
    for one in longest:
        by_engine[one.rollout.engine_name].append(one)
    bars: list[Bar] = []
    engines: list[EngineRows] = []
    first = 0
    for engine in sorted(by_engine):
        rows = _rows(by_engine[engine])
        count = max(rows) + 1
        ordered = sorted(by_engine[engine], key=lambda one: one.started)
        bars += [Bar(first + row, one) for row, one in zip(rows, ordered, strict=True)]
        engines.append(EngineRows(engine, first, count))
        first += count
    return bars, engines


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
