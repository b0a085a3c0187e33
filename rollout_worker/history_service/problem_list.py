"""The problems of a history, with the lengths and rewards of their rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from rollout_worker.history.store import HistoryStore


@dataclass(frozen=True)
class ProblemRow:
    """A problem, as ``rollout history problems`` lists it."""

    problem: str
    rollouts: int
    """Number of rollouts whose lengths the history knows."""
    mean_length: float
    """Mean number of response tokens; a rollout that was cut off counts with the tokens that it has."""
    longest: int
    cut_off: int
    """Number of rollouts that were cut off."""
    mean_reward: float | None
    """Mean of the rewards that are known; None if there are none."""
    bytes: int
    """Size of the problem's keys in Redis."""
    last_used: float
    """Unix time of the last append to it or draft from it, by the server's clock."""


def problem_rows(store: HistoryStore) -> list[ProblemRow]:
    """Return a row for each problem, in the order of their last use.

    Raises:
        redis.RedisError: the server fails.
    """
    stored = store.catalog.problems()
    entries_by_problem = store.statistics.length_entries_by_problem(problem.problem_id for problem in stored)
    rows = []
    for problem in stored:
        entries = entries_by_problem[problem.problem_id]
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        rows.append(
            ProblemRow(
                problem=problem.problem_id,
                rollouts=len(entries),
                mean_length=fmean(entry.length for entry in entries) if entries else 0.0,
                longest=max((entry.length for entry in entries), default=0),
                cut_off=sum(entry.cut_off for entry in entries),
                mean_reward=fmean(rewards) if rewards else None,
                bytes=problem.bytes,
                last_used=problem.last_used,
            )
        )
    return rows
