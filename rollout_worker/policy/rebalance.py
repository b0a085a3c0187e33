"""Chooses which rollouts migrate at the end of a training step, when some engines are idle and others are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rollout_worker.policy.step_cost import StepCost

HANDOVER_S = 0.5
"""Seconds between the source engine's last token of a rollout and the target's first, without reading its context."""
_MIN_SAVED_SHARE = 0.05
"""Share of the remaining time that migrations must save together; predictions are not more accurate than this."""
_MAX_MIGRATIONS = 16


class PlacedRollout(NamedTuple):
    """A rollout that runs on an engine."""

    key: tuple[str, int]
    """Request id and sample."""
    context_tokens: int
    """Number of tokens of its prompt and response so far, all of which another engine would have to read."""
    remaining_steps: float
    """Expected number of steps until it ends."""


class Migration(NamedTuple):
    """The decision to continue a rollout on another engine."""

    key: tuple[str, int]
    """Request id and sample."""
    source: str
    target: str


def remaining_seconds(rollouts: Sequence[PlacedRollout], cost: StepCost) -> float:
    """Predict the seconds until the last of an engine's rollouts ends; steps get shorter as the others end."""
    ordered = sorted(rollouts, key=lambda rollout: rollout.remaining_steps)
    running, context_tokens, seconds = len(ordered), sum(rollout.context_tokens for rollout in ordered), 0.0
    for start, end in pairwise([0.0, *(rollout.remaining_steps for rollout in ordered)]):
        seconds += (end - start) * cost.step_time(running, context_tokens)
        context_tokens -= ordered[len(ordered) - running].context_tokens
        running -= 1
    return seconds


def plan_rebalancing(
    engines: Mapping[str, Sequence[PlacedRollout]],
    cost: StepCost,
    *,
    movable: Collection[tuple[str, int]] | None = None,
) -> list[Migration]:
    """Choose migrations with which the last engine ends earlier. In most cases there are none.

    A migration costs :data:`HANDOVER_S` and the time to read the rollout's context, which delays the target's other
    rollouts. Each migration ends the slowest engine's work earlier by more than the handover takes. All migrations
    together must save a minimum share of the remaining time, so that rollouts do not move back and forth.

    Args:
        engines: the running rollouts of each engine; the engines must be interchangeable.
        cost: cost model of these engines.
        movable: rollouts that may migrate; None for all.
    """
    placement = {engine: list(running) for engine, running in engines.items()}
    ends = {engine: remaining_seconds(running, cost) for engine, running in placement.items()}
    delays: defaultdict[str, float] = defaultdict(float)
    """Seconds that an engine spends on taking over rollouts."""
    end_before = max(ends.values(), default=0.0)
    migrations: list[Migration] = []
    moved: set[tuple[str, int]] = set()
    while len(placement) > 1 and len(migrations) < _MAX_MIGRATIONS:
        source = max(ends, key=lambda engine: ends[engine])
        target = min(ends, key=lambda engine: ends[engine])
        best: tuple[float, PlacedRollout] | None = None
        for rollout in placement[source]:
            if rollout.key in moved or (movable is not None and rollout.key not in movable):
                continue
            others = [other for other in placement[source] if other is not rollout]
            takeover_s = HANDOVER_S + cost.per_token_s * rollout.context_tokens
            target_end = delays[target] + takeover_s + remaining_seconds([*placement[target], rollout], cost)
            end = max(delays[source] + remaining_seconds(others, cost), target_end)
            if best is None or end < best[0]:
                best = end, rollout
        if best is None or best[0] > ends[source] - HANDOVER_S:
            break
        rollout = best[1]
        placement[source].remove(rollout)
        placement[target].append(rollout)
        delays[target] += HANDOVER_S + cost.per_token_s * rollout.context_tokens
        for engine in (source, target):
            ends[engine] = delays[engine] + remaining_seconds(placement[engine], cost)
        moved.add(rollout.key)
        migrations.append(Migration(rollout.key, source, target))
    end_after = max(ends.values(), default=0.0)
    return migrations if end_after < end_before * (1 - _MIN_SAVED_SHARE) - HANDOVER_S else []
