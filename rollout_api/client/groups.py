"""Rollouts of one step, collected by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.protocol.messages import Rollout, RolloutId


@dataclass(frozen=True)
class Groups:
    """A step's rollouts by the index of their prompt; each group is ordered by sample."""

    complete: dict[int, list[Rollout]]
    """Groups in which every rollout ended by itself or reached its token limit."""
    partial: dict[int, list[Rollout]]
    """All other groups: a rollout was cancelled, reached its deadline, failed, or is missing because its request was
    never sent."""


class GroupCollector:
    """Collects a step's rollouts and counts the complete groups.

    Args:
        sizes: number of rollouts that each prompt asks for.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.num_complete = 0
        """Number of complete groups so far."""
        self._num_missing = list(sizes)
        self._groups: list[list[Rollout]] = [[] for _ in sizes]

    def add(self, prompt_index: int, rollout: Rollout) -> None:
        """Add a rollout of a prompt."""
        self._groups[prompt_index].append(rollout)
        if rollout.finish_reason.complete:
            self._num_missing[prompt_index] -= 1
            self.num_complete += self._num_missing[prompt_index] == 0

    def groups(self) -> Groups:
        """Return the rollouts so far, divided into complete and partial groups."""
        complete: dict[int, list[Rollout]] = {}
        partial: dict[int, list[Rollout]] = {}
        for index, (num_missing, group) in enumerate(zip(self._num_missing, self.in_order(), strict=True)):
            (partial if num_missing > 0 else complete)[index] = group
        return Groups(complete, partial)

    def in_order(self) -> list[list[Rollout]]:
        """Return the groups in the order of the prompts, each ordered by sample."""
        return [sorted(group, key=_sample) for group in self._groups]


def _sample(rollout: Rollout) -> int:
    return RolloutId.parse(rollout.rollout_id).sample
