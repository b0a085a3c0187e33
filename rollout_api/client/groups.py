"""Rollouts of one step, put together by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.protocol.messages import Rollout, RolloutId


@dataclass(frozen=True)
class Groups:
    """A step's rollouts by prompt (its index among the step's prompts), each group ordered by sample."""

    complete: dict[int, list[Rollout]]
    """Groups of which every rollout ended as sampling ends."""
    partial: dict[int, list[Rollout]]
    """The others: some rollout was cancelled, cut at its deadline or failed; without any if it was never sent."""


class Gathering:
    """Takes a step's rollouts as they come and knows how many groups are complete."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Take how many rollouts each prompt asks for."""
        self.complete = 0
        """Groups that are complete by now."""
        self._sizes = list(sizes)
        self._left = list(sizes)
        self._groups: list[list[Rollout]] = [[] for _ in sizes]

    def add(self, index: int, rollout: Rollout) -> None:
        """Take a rollout of prompt *index*."""
        self._groups[index].append(rollout)
        if rollout.finish_reason.complete:
            self._left[index] -= 1
            self.complete += self._left[index] == 0

    def groups(self) -> Groups:
        """What there is."""
        parted: tuple[dict[int, list[Rollout]], dict[int, list[Rollout]]] = ({}, {})
        for index, (left, group) in enumerate(zip(self._left, self._groups, strict=True)):
            parted[left > 0][index] = sorted(group, key=_sample)
        return Groups(*parted)

    def in_order(self) -> list[list[Rollout]]:
        """All groups in the order of the prompts."""
        return [sorted(group, key=_sample) for group in self._groups]


def _sample(rollout: Rollout) -> int:
    return RolloutId.parse(rollout.rollout_id).sample
