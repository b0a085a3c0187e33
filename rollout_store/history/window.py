"""Decides which rollouts of a problem are kept: those in its window.

The window is counted per problem: it holds the rollouts of the newest generations in which *this problem* was sampled.
A problem that is sampled once per epoch therefore keeps the rollouts of several epochs, however many weight versions
each epoch has.
"""

from __future__ import annotations

from collections.abc import Iterable


def oldest_kept(generations: Iterable[int], window: int) -> int:
    """Return the oldest generation of a problem that is kept. ``append.lua`` implements the same rule.

    Args:
        generations: generations that sampled the problem.
        window: number of its newest generations that are kept, at least 1.

    Returns:
        One of *generations*; 0 if there is none.
    """
    return min(sorted(set(generations))[-window:], default=0)
