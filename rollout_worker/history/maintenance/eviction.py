"""Decides what is deleted from a history that exceeds its byte cap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ProblemSize(NamedTuple):
    """The size of a problem. Its bytes are assumed to be spread evenly over its generations."""

    bytes: int
    generations: int
    """Number of generations, at least 1."""


def generations_to_keep(problems: Sequence[ProblemSize], target: float) -> list[int]:
    """Return how many generations each problem keeps, so that all problems together take at most *target* bytes.

    The oldest generations are deleted first, from all problems alike: the problems with the most generations lose one,
    then all problems with as many as these have now, and so on. Among problems with equally many generations, the least
    recently used ones lose theirs first. A problem that loses its only generation is deleted. That comes last, because
    training returns to its problems in turn and would always miss the problem that was deleted just before.

    Args:
        problems: sizes, least recently used first.
        target: target size in bytes.

    Returns:
        For each problem a number from 0 to its number of generations. As few generations as possible are deleted: with
        one more, the total would exceed *target*.
    """
    size = float(sum(problem.bytes for problem in problems))
    bytes_per_generation = [problem.bytes / problem.generations for problem in problems]
    level = max((problem.generations for problem in problems), default=0)
    freed_at_level = [0.0] * (level + 1)
    for problem, share in zip(problems, bytes_per_generation, strict=True):
        freed_at_level[problem.generations] += share
    freed = 0.0
    while size > target and level > 0:
        freed += freed_at_level[level]
        if size - freed <= target:
            break
        size -= freed
        level -= 1
    kept = [min(problem.generations, level) for problem in problems]
    for position, problem in enumerate(problems):
        if size <= target:
            break
        if problem.generations >= level > 0:
            kept[position] = level - 1
            size -= bytes_per_generation[position]
    return kept
