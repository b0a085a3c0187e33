"""The figures of one training step, computed from its rollouts and their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from typing_extensions import Self

from rollout_api.client.group_queue import Group
from rollout_api.errors import InvalidRequestError
from rollout_api.figures.rollout_summary import RolloutSummary
from rollout_api.figures.timeline import Timeline
from rollout_api.protocol.messages import FinishReason, Rollout

PREFIX = "rollout/"
"""What the names of metrics begin with."""


@dataclass(frozen=True)
class StepFigures:
    """Figures of a training step. A figure is None if it is unknown, for example the acceptance rate without drafts.

    Each turn of a trajectory counts as a rollout.
    """

    num_rollouts: int
    """Number of rollouts."""
    num_tokens: int
    """Number of response tokens of all rollouts."""
    length_mean: float | None
    """Mean length, in tokens, of the rollouts that ended by themselves or at their token limit."""
    length_p50: float | None
    """Median length of these rollouts."""
    length_p90: float | None
    """Length that 90 % of these rollouts do not exceed."""
    length_p99: float | None
    """Length that 99 % of these rollouts do not exceed."""
    length_max: float | None
    """Greatest length of these rollouts."""
    truncated_share: float | None
    """Share of the rollouts that ended at their token limit."""
    interrupted_share: float | None
    """Share of the rollouts that were cancelled or reached their deadline."""
    failed_share: float | None
    """Share of the rollouts that the job could not sample."""
    makespan_s: float | None
    """Seconds from the first start of a rollout until the last end."""
    tail_s: float | None
    """Seconds at the end of the makespan during which fewer than half as many rollouts ran as at the step's peak."""
    tail_share: float | None
    """Share of the makespan that is the tail."""
    longest_share: float | None
    """Share of the makespan during which the rollout with the longest duration ran."""
    tokens_per_s: float | None
    """Response tokens per second of the makespan."""
    accepted_per_step: float | None
    """Accepted draft tokens per decoding step of a rollout."""
    acceptance_rate: float | None
    """Share of the draft tokens that were accepted."""
    accepted_share: float | None
    """Share of the sampled tokens that were accepted draft tokens."""
    accepted_share_history: float | None
    """Share of the sampled tokens that were accepted draft tokens from the history."""
    accepted_share_self: float | None
    """The same for drafts from the rollout's own text."""
    accepted_share_siblings: float | None
    """The same for drafts from siblings."""
    accepted_share_cross_problem: float | None
    """The same for drafts from rollouts of other problems."""
    weight_version: int | None
    """Newest weight version that sampled a token."""
    staleness_mean: float | None
    """Mean staleness of the rollouts, in weight versions."""
    staleness_max: int | None
    """Greatest staleness of a rollout, in weight versions."""
    reward_mean: float | None
    """Mean reward."""
    reward_std: float | None
    """Standard deviation of the rewards over all rollouts of the step (population)."""
    equal_reward_share: float | None
    """Share of the problems whose rewards are all equal, from which GRPO learns nothing."""

    @classmethod
    def from_rollouts(
        cls,
        rollouts: Iterable[Rollout],
        rewards: Mapping[str, float] | None = None,
        *,
        newest_version: int | None = None,
    ) -> Self:
        """Compute the figures of a step's rollouts.

        Args:
            rollouts: the rollouts.
            rewards: reward by rollout id, as for ``client.report_rewards``. Rollouts without one are left out of the
                figures about rewards.
            newest_version: newest published weight version; without it, staleness is unknown.

        Raises:
            InvalidRequestError: a reward is not finite, or belongs to none of the rollouts.
        """
        remaining = dict(rewards or {})
        summaries = [
            RolloutSummary.of(rollout, reward=remaining.pop(rollout.rollout_id, None), newest_version=newest_version)
            for rollout in rollouts
        ]
        if remaining:
            raise InvalidRequestError(
                f"rewards: no rollout of the step has the id {next(iter(remaining))!r}; {len(remaining)} of the "
                f"{len(rewards or {})} rewards belong to other rollouts. Pass the rewards of this step's rollouts only"
            )
        return cls.from_summaries(summaries)

    @classmethod
    def from_groups(cls, groups: Iterable[Group]) -> Self:
        """Compute the figures of groups that were taken from a queue of groups.

        The staleness is that of each group when it was taken.

        Raises:
            InvalidRequestError: a reward is not finite.
        """
        return cls.from_summaries(
            RolloutSummary.of(
                rollout,
                reward=None if group.rewards is None else group.rewards[index],
                newest_version=group.newest_version,
            )
            for group in groups
            for index, rollout in enumerate(group.rollouts)
        )

    @classmethod
    def from_summaries(cls, summaries: Iterable[RolloutSummary]) -> Self:
        """Compute the figures of a step from the summaries of its rollouts, for example of several processes.

        Raises:
            InvalidRequestError: a reward is not finite.
        """
        rollouts = list(summaries)
        lengths = sorted(rollout.num_tokens for rollout in rollouts if rollout.finish_reason.complete)
        num_tokens = sum(rollout.num_tokens for rollout in rollouts)
        timeline = Timeline.from_intervals(
            (rollout.started_at, rollout.finished_at) for rollout in rollouts if rollout.started_at > 0
        )
        makespan = timeline.makespan if timeline else 0.0
        num_steps = sum(rollout.num_decoding_steps for rollout in rollouts)
        num_accepted = sum(rollout.num_accepted_tokens for rollout in rollouts)
        versions = [rollout.weight_version for rollout in rollouts if rollout.weight_version is not None]
        staleness = [rollout.staleness for rollout in rollouts if rollout.staleness is not None]
        rewards_of = _rewards_by_problem(rollouts)
        rewards = [reward for group in rewards_of for reward in group]

        def accepted_share(source: str) -> float | None:
            accepted = sum(rollout.accepted_by_source.get(source, 0) for rollout in rollouts)
            return _ratio(accepted, num_steps + num_accepted)

        def share_of(*reasons: FinishReason) -> float | None:
            return _ratio(sum(rollout.finish_reason in reasons for rollout in rollouts), len(rollouts))

        return cls(
            num_rollouts=len(rollouts),
            num_tokens=num_tokens,
            length_mean=_mean(lengths),
            length_p50=_quantile(lengths, 50),
            length_p90=_quantile(lengths, 90),
            length_p99=_quantile(lengths, 99),
            length_max=_quantile(lengths, 100),
            truncated_share=share_of(FinishReason.LENGTH),
            interrupted_share=share_of(FinishReason.CANCELLED, FinishReason.DEADLINE),
            failed_share=share_of(FinishReason.FAILED),
            makespan_s=timeline.makespan if timeline else None,
            tail_s=timeline.tail if timeline else None,
            tail_share=_ratio(timeline.tail, makespan) if timeline else None,
            longest_share=_ratio(timeline.longest, makespan) if timeline else None,
            tokens_per_s=_ratio(num_tokens, makespan),
            accepted_per_step=_ratio(num_accepted, num_steps),
            acceptance_rate=_ratio(num_accepted, sum(rollout.num_draft_tokens for rollout in rollouts)),
            accepted_share=_ratio(num_accepted, num_steps + num_accepted),
            accepted_share_history=accepted_share("history"),
            accepted_share_self=accepted_share("self"),
            accepted_share_siblings=accepted_share("siblings"),
            accepted_share_cross_problem=accepted_share("cross_problem"),
            weight_version=max(versions, default=None),
            staleness_mean=_mean(staleness),
            staleness_max=max(staleness, default=None),
            reward_mean=_mean(rewards),
            reward_std=statistics.pstdev(rewards) if rewards else None,
            equal_reward_share=_ratio(sum(len(set(group)) == 1 for group in rewards_of), len(rewards_of)),
        )

    def metrics(self) -> dict[str, float]:
        """Return the figures that are known, by the names under which they are logged, such as ``rollout/tail_s``."""
        values = {f"{PREFIX}{field.name}": getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}


def metric_names() -> list[str]:
    """Return the names of all metrics, in the order of the figures."""
    return [f"{PREFIX}{field.name}" for field in fields(StepFigures)]


def _rewards_by_problem(rollouts: Sequence[RolloutSummary]) -> list[list[float]]:
    """Return the rewards of each problem that has any.

    Raises:
        InvalidRequestError: a reward is not finite.
    """
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        if not math.isfinite(rollout.reward):
            raise InvalidRequestError(
                f"a rollout of problem {rollout.problem_id!r} has the reward {rollout.reward}; rewards must be finite"
            )
        groups.setdefault(rollout.problem_id, []).append(rollout.reward)
    return list(groups.values())


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _quantile(ordered: Sequence[int], percent: int) -> float | None:
    """Return the smallest of the values, in ascending order, that at least *percent* % of them do not exceed."""
    return float(ordered[-(-len(ordered) * percent // 100) - 1]) if ordered else None
