"""Rewards of a step's rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, stdev
from typing import NamedTuple

from rollout_worker.report.analysis.steps import Step


class StepRewards(NamedTuple):
    """The rewards of a step."""

    mean: float
    error: float
    """Standard error of the mean; 0 for a single reward."""
    equal_groups: float | None
    """Share of the groups whose rewards are all equal, from which GRPO learns nothing; None without groups."""


def rewards_of(step: Step) -> StepRewards | None:
    """Return the rewards of a step; None if it has none."""
    rewards = [one.reward for one in step.scored if one.reward is not None]
    if not rewards:
        return None
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in step.scored:
        if one.reward is not None:
            groups[one.rollout.problem_id].append(one.reward)
    compared = [group for group in groups.values() if len(group) > 1]
    equal = sum(min(group) == max(group) for group in compared) / len(compared) if compared else None
    error = stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return StepRewards(fmean(rewards), error, equal)
