"""The figures of one training step: how its rollouts were drafted, how long its tail was, and their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from typing_extensions import Self

from rollout_api.client.group_queue import Group
from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import FinishReason, Rollout


@dataclass(frozen=True)
class RolloutSummary:
    """The numbers of one rollout. They are small, so that processes of a trainer can send them to each other."""

    problem_id: str
    """Id of the problem."""
    num_tokens: int
    """Number of response tokens."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    num_decoding_steps: int
    """Decoding steps of the engine that finished the rollout."""
    num_draft_tokens: int
    """Draft tokens that were verified in these steps."""
    num_accepted_tokens: int
    """Draft tokens that were accepted in these steps."""
    accepted_by_source: dict[str, int]
    """Source → number of its draft tokens among them; see ``Rollout.accepted_tokens_by_source``."""
    started_at: float
    """Unix time at which an engine started the rollout; 0 if none did."""
    finished_at: float
    """Unix time at which the rollout finished."""
    weight_version: int | None
    """Newest weight version that sampled a token; None without tokens."""
    staleness: int | None
    """Number of weight versions by which the oldest token was behind the newest published version; None without tokens,
    or if the newest version is unknown."""
    reward: float | None
    """Reward; None if there is none."""

    @classmethod
    def of(cls, rollout: Rollout, *, reward: float | None = None, newest_version: int | None = None) -> Self:
        """Return the summary of a rollout.

        Args:
            rollout: the rollout.
            reward: its reward, if it has one.
            newest_version: newest published weight version when the rollout was taken, if it is known.
        """
        oldest = rollout.oldest_weight_version
        return cls(
            problem_id=rollout.problem_id,
            num_tokens=rollout.num_tokens,
            finish_reason=rollout.finish_reason,
            num_decoding_steps=rollout.num_decoding_steps,
            num_draft_tokens=rollout.num_draft_tokens,
            num_accepted_tokens=rollout.num_accepted_tokens,
            accepted_by_source=rollout.accepted_tokens_by_source,
            started_at=rollout.started_at,
            finished_at=rollout.finished_at,
            weight_version=max((span.weight_version for span in rollout.weight_spans), default=None),
            staleness=None if oldest is None or newest_version is None else max(0, newest_version - oldest),
            reward=reward,
        )


@dataclass(frozen=True)
class Timeline:
    """When the rollouts of a training step ran."""

    start: float
    """First start of a rollout."""
    tail_start: float
    """Time from which on fewer than half as many rollouts ran as at the step's peak.

    The peak counts instead of the number of the step's rollouts, because engines that run fewer rollouts at once than
    the step has are nevertheless busy.
    """
    end: float
    """Last end of a rollout."""
    longest: float
    """Seconds for which the rollout with the longest duration ran."""

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end."""
        return self.end - self.start

    @property
    def tail(self) -> float:
        """Seconds of the tail."""
        return self.end - self.tail_start

    @classmethod
    def from_intervals(cls, intervals: Iterable[tuple[float, float]]) -> Self | None:
        """Compute the times in O(n log n).

        Args:
            intervals: Unix time of the start and of the end of each rollout. An end before its start, as clocks of
                different machines may report, counts as an end at the start.

        Returns:
            The times; None without rollouts.
        """
        runs = [(start, max(start, end)) for start, end in intervals]
        if not runs:
            return None
        # Of equal times, ends come first: a rollout that takes the place of another one does not run beside it.
        events = sorted(
            (time, change) for start, end in runs if end > start for time, change in ((start, 1), (end, -1))
        )
        running = list(accumulate((change for _, change in events), initial=0))
        peak = max(running)
        last_end = max(end for _, end in runs)
        # The tail begins at the last event until which at least half of the peak ran.
        tail_start = max(
            (time for (time, _), before in zip(events, running[:-1], strict=True) if 2 * before >= peak),
            default=last_end,
        )
        return cls(
            start=min(start for start, _ in runs),
            tail_start=tail_start,
            end=last_end,
            longest=max(end - start for start, end in runs),
        )


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
