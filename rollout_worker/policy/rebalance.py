"""Which rollouts go on elsewhere at the end of a step, when engines are idle while others still have many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rollout_worker.policy.step_cost import StepCost

HANDOVER_S = 0.5
"""Between an engine's last token of a rollout and the next engine's first, but for reading what there is of it."""
_WORTH = 0.05
"""Share of the time until the last engine ends that moves must save together; expectations are no better."""
_MOST_MOVES = 16


class Running(NamedTuple):
    """A rollout that an engine makes."""

    rollout: tuple[str, int]
    """Request and sample."""
    context: int
    """Tokens of prompt and response so far, all of which another engine would have to read."""
    steps: float
    """That it is expected to take until it ends."""


class Move(NamedTuple):
    """A rollout goes on elsewhere."""

    rollout: tuple[str, int]
    source: str
    target: str


def time_until_end(running: Sequence[Running], cost: StepCost) -> float:
    """Seconds until the last of an engine's rollouts ends, steps getting shorter as others end."""
    ordered = sorted(running, key=lambda one: one.steps)
    left, context, seconds = len(ordered), sum(one.context for one in ordered), 0.0
    for before, after in pairwise([0.0, *(one.steps for one in ordered)]):
        seconds += (after - before) * cost.time(left, context)
        context -= ordered[len(ordered) - left].context
        left -= 1
    return seconds


def rebalance(
    engines: Mapping[str, Sequence[Running]], cost: StepCost, *, movable: Collection[tuple[str, int]] | None = None
) -> list[Move]:
    """Moves that let the last engine end sooner; most often none.

    What a move costs is :data:`HANDOVER_S` and reading what there is of the rollout anew, which holds up whatever else
    the engine has; it lets its engine end sooner by more than the former. All together save a share of the time, so
    that nothing goes to and fro when it is asked again.

    Args:
        engines: what each has; all of one kind.
        cost: of their steps.
        movable: rollouts that may go on elsewhere; None: all.
    """
    now = {engine: list(running) for engine, running in engines.items()}
    ends = {engine: time_until_end(running, cost) for engine, running in now.items()}
    delays: defaultdict[str, float] = defaultdict(float)
    before = max(ends.values(), default=0.0)
    moves: list[Move] = []
    moved: set[tuple[str, int]] = set()
    while len(now) > 1 and len(moves) < _MOST_MOVES:
        source = max(ends, key=lambda engine: ends[engine])
        target = min(ends, key=lambda engine: ends[engine])
        best: tuple[float, Running] | None = None
        for one in now[source]:
            if one.rollout in moved or (movable is not None and one.rollout not in movable):
                continue
            rest = [other for other in now[source] if other is not one]
            read = HANDOVER_S + cost.per_token * one.context
            there = delays[target] + read + time_until_end([*now[target], one], cost)
            until = max(delays[source] + time_until_end(rest, cost), there)
            if best is None or until < best[0]:
                best = until, one
        if best is None or best[0] > ends[source] - HANDOVER_S:
            break
        one = best[1]
        now[source].remove(one)
        now[target].append(one)
        delays[target] += HANDOVER_S + cost.per_token * one.context
        for engine in (source, target):
            ends[engine] = delays[engine] + time_until_end(now[engine], cost)
        moved.add(one.rollout)
        moves.append(Move(one.rollout, source, target))
    return moves if max(ends.values(), default=0.0) < before * (1 - _WORTH) - HANDOVER_S else []
