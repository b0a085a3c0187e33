"""Predicted lengths of running rollouts, for draft policies that depend on them."""

from __future__ import annotations

from typing import Protocol

from rollout_api.length_stats import LengthStats
from rollout_store.arrays import Integers
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy
from rollout_worker.policy.length_classes import LengthClasses


class LengthSource(Protocol):
    """The lengths of earlier rollouts. No method waits for anything."""

    def of_problem(self, problem: str) -> LengthStats:
        """Return the length statistics of a problem, by problem id."""
        ...

    def overall(self) -> LengthStats:
        """Return those of all problems."""
        ...


class ReplanSchedule:
    """Decides when to plan again: periodically, and earlier when rollouts have started or ended."""

    def __init__(self, steps: int, min_steps: int) -> None:
        """Plan every so many *steps*, or after *min_steps* if rollouts have started or ended since."""
        self._interval, self._min_interval = steps, min_steps
        self._steps = steps
        self._changed = False

    def mark_changed(self) -> None:
        """Note that a rollout has started or ended."""
        self._changed = True

    def is_due(self) -> bool:
        """Return whether to plan again in this step. Call it once per step."""
        self._steps += 1
        if self._steps < (self._min_interval if self._changed else self._interval):
            return False
        self._steps, self._changed = 0, False
        return True


class LengthPredictingPolicy(DraftPolicy):
    """Base class of policies that predict the lengths of the running rollouts."""

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits)
        self._lengths = lengths
        self._problems: dict[int, str] = {}
        """By row."""
        self.length_classes: LengthClasses = LengthClasses(lengths)

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._problems[row] = problem
        self.length_classes.open(row, problem, generated)
        return row

    def close(self, row: int, *, ended: bool = True) -> None:
        """See :meth:`DraftPolicy.close`."""
        super().close(row, ended=ended)
        self.length_classes.close(row)
        del self._problems[row]

    def _classify(self, rows: Integers) -> Integers:
        """See :meth:`LengthClasses.update`."""
        return self.length_classes.update(rows, self._rollouts.generated[rows])
