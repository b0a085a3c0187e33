"""A running batch of recorded rollouts, one verification step after the other, for drafters that see whole batches.

Rollouts start in groups of :data:`GROUP` rollouts of one problem. One that has ended is replaced by the next one. A
draft token is accepted if it agrees with the recording. Only the first turn of a trajectory is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.problems import Problem
from benchmarks.replay import with_end_of_turn
from benchmarks.traces import Tokens, Trajectory

GROUP = 8
"""Rollouts of one problem that start together."""
_PADDING = -2
"""Follows the recorded tokens; no drafter drafts it."""


class BatchDrafter(Protocol):
    """A drafter for a batch with a fixed number of places, each of which one rollout occupies."""

    name: str
    drafts: npt.NDArray[np.int64]
    """The tokens of the drafts, shape (places, maximum draft length)."""
    lengths: npt.NDArray[np.int32]
    """The lengths of the drafts, shape (places,)."""

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """Begin a rollout of *tokens*, of which the drafter may use the number only."""

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """End the rollout at a place; its tokens become history."""

    def step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """Draft for all places. This is the critical path of a decoding step.

        Args:
            sampled: the sampled tokens, shape (places, maximum draft length + 1).
            num_sampled: how many tokens of each row are valid, shape (places,).
        """

    def after_step(self, num_sampled: npt.NDArray[np.int32], verified: npt.NDArray[np.int32]) -> None:
        """Do what is not needed before the forward pass begins.

        Args:
            num_sampled: how many tokens the last step sampled at each place, shape (places,).
            verified: how many draft tokens it verified, shape (places,).
        """


def first_turn(trajectory: Trajectory) -> Tokens:
    """Return the first turn of the model, with the token that ends it."""
    return with_end_of_turn(next(segment.tokens for segment in trajectory.segments if segment.generated))


def in_groups(problems: Sequence[Problem]) -> Iterator[Trajectory]:
    """Yield the evaluated rollouts in groups of :data:`GROUP` rollouts of one problem, again and again."""
    groups = [
        problem.evaluated[start : start + GROUP]
        for start in range(0, max(len(problem.evaluated) for problem in problems), GROUP)
        for problem in problems
    ]
    for group in cycle(groups):
        yield from group


class RecordedBatch:
    """The rollouts that run at the same time."""

    def __init__(self, problems: Sequence[Problem], size: int, max_draft: int) -> None:
        self._waiting = in_groups(problems)
        longest = max(len(first_turn(trajectory)) for problem in problems for trajectory in problem.evaluated)
        self._recorded = np.full((size, longest + max_draft + 1), _PADDING, np.int64)
        self._lengths = np.zeros(size, np.int64)
        self._position = np.zeros(size, np.int64)
        self._prompt_tokens = np.zeros(size, np.int64)
        self._columns = np.arange(max_draft + 1)
        self._rollouts: list[tuple[Trajectory, Tokens]] = []
        self.sampled = np.zeros((size, max_draft + 1), np.int64)
        """The tokens that the last step sampled, shape (places, maximum draft length + 1)."""
        self.num_sampled = np.zeros(size, np.int32)
        """How many of them are valid, shape (places,)."""

    @property
    def context_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens of prompt and response of each rollout, shape (places,)."""
        return self._prompt_tokens + self._position

    def start(self, drafter: BatchDrafter) -> None:
        """Fill all places."""
        for place in range(len(self._lengths)):
            self._rollouts.append(self._start(place, drafter))

    def _start(self, place: int, drafter: BatchDrafter) -> tuple[Trajectory, Tokens]:
        trajectory = next(self._waiting)
        tokens = first_turn(trajectory)
        self._recorded[place] = _PADDING
        self._recorded[place, : len(tokens)] = tokens
        self._lengths[place], self._position[place] = len(tokens), 0
        self._prompt_tokens[place] = len(trajectory.prompt)
        drafter.open(place, trajectory, tokens)
        return trajectory, tokens

    def verify(self, drafts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> None:
        """Sample the accepted draft tokens of each rollout and one more.

        Args:
            drafts: draft tokens, shape (places, maximum draft length).
            lengths: how many of them are valid, shape (places,).
        """
        recorded = np.take_along_axis(self._recorded, self._position[:, None] + self._columns, axis=1)
        is_accepted = (recorded[:, :-1] == drafts) & (self._columns[:-1] < lengths[:, None])
        accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        self.sampled[:] = recorded
        self.num_sampled[:] = np.minimum(accepted + 1, self._lengths - self._position)
        self._position += self.num_sampled

    def replace_ended(self, drafter: BatchDrafter) -> npt.NDArray[np.int64]:
        """Replace the rollouts that have ended, and return their places, shape (ended rollouts,)."""
        ended = np.flatnonzero(self._position >= self._lengths)
        for place in ended.tolist():
            drafter.close(place, *self._rollouts[place])
            self._rollouts[place] = self._start(place, drafter)
        return ended
