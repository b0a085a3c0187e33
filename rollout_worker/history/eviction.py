"""What leaves a history that is larger than its byte cap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """What a problem holds; its bytes are taken to be spread evenly over its generations."""

    bytes: int
    generations: int
    """1 or more."""


def select_evictions(held: Sequence[Held], target: float) -> list[int]:
    """How many generations each problem keeps, so that all together take *target* bytes at most.

    The oldest generations leave first, of all problems alike: those that have the most keep one less, then all that
    have as many as they have now, and so on. Of problems that have equally many, those go first that were used least
    recently. A problem that loses its only generation leaves; that comes last, as training comes back to its problems
    in turn, and would always miss the one that left just before.

    Args:
        held: of each problem, the least recently used first.
        target: in bytes.

    Returns:
        For each, from 0 to the generations that it has. As few leave as can be: with one more, it would be too much.
    """
    size = float(sum(one.bytes for one in held))
    share = [one.bytes / one.generations for one in held]
    level = max((one.generations for one in held), default=0)
    lost_at = [0.0] * (level + 1)
    for one, of_each in zip(held, share, strict=True):
        lost_at[one.generations] += of_each
    losing = 0.0
    while size > target and level > 0:
        losing += lost_at[level]
        if size - losing <= target:
            break
        size -= losing
        level -= 1
    kept = [min(one.generations, level) for one in held]
    for place, one in enumerate(held):
        if size <= target:
            break
        if one.generations >= level > 0:
            kept[place] = level - 1
            size -= share[place]
    return kept
