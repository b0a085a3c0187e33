"""Rollouts of one step, collected by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_api.errors import RolloutClientError, count_of, list_reasons
from rollout_api.protocol.messages import FinishReason, Rollout, RolloutId


@dataclass(frozen=True)
class Groups:
    """A step's rollouts by the index of their prompt; each group is ordered by sample."""

    complete: dict[int, list[Rollout]]
    """Groups in which every rollout ended by itself or reached its token limit."""
    partial: dict[int, list[Rollout]]
    """All other groups: a rollout was cancelled, reached its deadline, failed, or is missing because its request was
    never sent."""

    def in_order(self) -> list[list[Rollout]]:
        """Return all groups in the order of their prompts."""
        groups = self.complete | self.partial
        return [groups[index] for index in sorted(groups)]


class RolloutsFailedError(RolloutClientError):
    """The job could not produce some rollouts. Their results are acknowledged, and :attr:`groups` has all others.

    Args:
        groups: all rollouts of the call, by prompt.
        failures: reason for each rollout that failed, by rollout id.
    """

    def __init__(self, groups: list[list[Rollout]], failures: Mapping[str, str]) -> None:
        self.groups = groups
        """All rollouts of the call, by prompt; those that failed have the finish reason ``failed``."""
        self.failures = dict(failures)
        """Reason for each rollout that failed, by rollout id."""
        super().__init__(
            f"{count_of(failures, 'rollout')} of {sum(map(len, groups))} failed: {list_reasons(failures)}. The others "
            "are in the error's groups; pass allow_failed=True to have all returned"
        )


class GroupCollector:
    """Collects a step's rollouts until enough groups are complete.

    Args:
        sizes: number of rollouts that each prompt asks for.
        min_complete: number of complete groups that are enough; None if all groups are wanted.
    """

    def __init__(self, sizes: Sequence[int], min_complete: int | None = None) -> None:
        self._min_complete = min_complete
        self._num_complete = 0
        self._num_missing = list(sizes)
        self._groups: list[list[Rollout]] = [[] for _ in sizes]

    @property
    def should_stop(self) -> bool:
        """Whether enough groups are complete, so that the rest of the step may be cancelled."""
        return self._min_complete is not None and self._num_complete >= self._min_complete

    def add(self, prompt_index: int, rollout: Rollout) -> None:
        """Add a rollout of a prompt."""
        self._groups[prompt_index].append(rollout)
        if rollout.finish_reason.complete:
            self._num_missing[prompt_index] -= 1
            self._num_complete += self._num_missing[prompt_index] == 0

    def groups(self) -> Groups:
        """Return the rollouts so far, divided into complete and partial groups."""
        complete: dict[int, list[Rollout]] = {}
        partial: dict[int, list[Rollout]] = {}
        for index, (num_missing, group) in enumerate(zip(self._num_missing, self._groups, strict=True)):
            (partial if num_missing > 0 else complete)[index] = sorted(group, key=_sample)
        return Groups(complete, partial)


def without_failures(groups: list[list[Rollout]]) -> list[list[Rollout]]:
    """Return *groups*, none of whose rollouts may have failed.

    Raises:
        RolloutsFailedError: rollouts have failed.
    """
    failed = [rollout for group in groups for rollout in group if rollout.finish_reason is FinishReason.FAILED]
    if failed:
        raise RolloutsFailedError(groups, {rollout.rollout_id: rollout.detail for rollout in failed})
    return groups


def _sample(rollout: Rollout) -> int:
    return RolloutId.parse(rollout.rollout_id).sample
