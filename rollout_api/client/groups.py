"""Rollouts of one step, collected by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_api.errors import RolloutClientError, count_of, list_reasons
from rollout_api.protocol.messages import FinishReason, Rollout, RolloutId
from rollout_api.str_enum import StrEnum


class GroupOrder(StrEnum):
    """Which groups are taken when not all are wanted."""

    READY_FIRST = "ready_first"
    """Those that finish first. Nothing waits for slow groups, but those with short responses are taken more often than
    they occur, so that training on them alone prefers short responses."""
    IN_ORDER = "in_order"
    """Those of the first prompts. Which groups are taken does not depend on the lengths of their responses."""


@dataclass(frozen=True)
class Groups:
    """A step's rollouts by the index of their prompt; each group is ordered by sample."""

    complete: dict[int, list[Rollout]]
    """Groups whose rollouts all ended by themselves or reached their token limit."""
    partial: dict[int, list[Rollout]]
    """All other groups: a rollout was cancelled, reached its deadline, failed, or is missing because its request was
    never sent."""
    surplus: dict[int, list[Rollout]] = field(default_factory=dict)
    """With :attr:`GroupOrder.IN_ORDER`, complete groups that were not needed. They have finished before others that
    were cancelled, so that taking them, too, would prefer short responses."""

    def in_order(self) -> list[list[Rollout]]:
        """Return all groups in the order of their prompts."""
        groups = self.complete | self.partial | self.surplus
        return [groups[index] for index in sorted(groups)]


class RolloutsFailedError(RolloutClientError):
    """The job could not produce some rollouts. Their results are released, and :attr:`groups` has all others.

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
        order: which groups count.
    """

    def __init__(
        self, sizes: Sequence[int], min_complete: int | None = None, order: GroupOrder = GroupOrder.READY_FIRST
    ) -> None:
        self._sizes, self._min_complete, self._order = list(sizes), min_complete, order
        self._num_complete = 0
        """Number of complete groups that count."""
        self._num_leading = 0
        """Number of groups at the beginning that have ended; with ``IN_ORDER``, the complete ones among them count."""
        self._num_missing = list(sizes)
        """For each group, the number of rollouts without which it is not complete."""
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
            if self._order is GroupOrder.READY_FIRST:
                self._num_complete += self._num_missing[prompt_index] == 0
        if self._order is GroupOrder.IN_ORDER:
            self._advance()

    def _advance(self) -> None:
        """Count the groups at the beginning that have ended, until enough are complete."""
        while self._num_leading < len(self._sizes) and not self.should_stop:
            if len(self._groups[self._num_leading]) < self._sizes[self._num_leading]:
                return
            self._num_complete += self._num_missing[self._num_leading] == 0
            self._num_leading += 1

    def groups(self) -> Groups:
        """Return the rollouts so far, divided into complete, partial and surplus groups."""
        groups = Groups({}, {})
        for index, (num_missing, group) in enumerate(zip(self._num_missing, self._groups, strict=True)):
            is_surplus = self._order is GroupOrder.IN_ORDER and self.should_stop and index >= self._num_leading
            kind = groups.partial if num_missing > 0 else groups.surplus if is_surplus else groups.complete
            kind[index] = sorted(group, key=_sample)
        return groups


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
