"""Metrics of one training step, computed from its rollouts and their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from typing_extensions import Self

from rollout_api.client.group_queue import Group
from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import FinishReason, Rollout


@dataclass(frozen=True)
class Timeline:
    """When the rollouts of a training step ran."""

    start: float
    """First start of a rollout."""
    tail_start: float
    """Start of the tail: afterwards, fewer than half as many rollouts ran as at the step's peak.

    The peak counts instead of the number of the step's rollouts, because engines that run fewer rollouts at once than
    the step has are nevertheless busy.
    """
    end: float
    """Last end of a rollout."""
    longest: float
    """Seconds that the rollout with the longest duration ran."""

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
    """How many weight versions the oldest token was behind the newest published version; None without tokens,
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


def step_metrics(
    rollouts: Iterable[Rollout | RolloutSummary | Group],
    rewards: Mapping[str, float] | None = None,
    *,
    newest_version: int | None = None,
) -> dict[str, float]:
    """Return the metrics of a training step by name, such as ``rollout/tail_s``.

    docs/integrations.md describes each of them. Metrics that are unknown are left out, for example the acceptance rate
    of a step without drafts. Each turn of a trajectory counts as a rollout.

    Args:
        rollouts: the rollouts of the step; or the summaries of the rollouts of several processes; or groups that were
            taken from a queue of groups, which have their own rewards and newest versions.
        rewards: reward by rollout id, as for ``client.report_rewards``. Rollouts without one are left out of the
            metrics about rewards.
        newest_version: newest published weight version; without it, the staleness is unknown.

    Raises:
        InvalidRequestError: a reward is not finite, or belongs to none of the rollouts.
    """
    remaining = dict(rewards or {})
    summaries: list[RolloutSummary] = []
    for one in rollouts:
        if isinstance(one, RolloutSummary):
            summaries.append(one)
        elif isinstance(one, Group):
            summaries += [
                RolloutSummary.of(rollout, reward=reward, newest_version=one.newest_version)
                for rollout, reward in zip_longest(one.rollouts, one.rewards or ())
            ]
        else:
            reward = remaining.pop(one.rollout_id, None)
            summaries.append(RolloutSummary.of(one, reward=reward, newest_version=newest_version))
    if remaining:
        raise InvalidRequestError(
            f"rewards: no rollout of the step has the id {next(iter(remaining))!r}; {len(remaining)} of the "
            f"{len(rewards or {})} rewards belong to other rollouts. Pass the rewards of this step's rollouts only"
        )
    values = {
        "num_rollouts": len(summaries),
        "num_tokens": sum(summary.num_tokens for summary in summaries),
        **_lengths(summaries),
        **_times(summaries),
        **_drafting(summaries),
        **_versions(summaries),
        **_rewards(summaries),
    }
    return {f"rollout/{name}": float(value) for name, value in values.items() if value is not None}


def _lengths(rollouts: Sequence[RolloutSummary]) -> dict[str, float | None]:
    """Return the lengths of the rollouts that ended by themselves or at their token limit, and how many did not."""
    lengths = sorted(rollout.num_tokens for rollout in rollouts if rollout.finish_reason.complete)

    def share_of(*reasons: FinishReason) -> float | None:
        return _ratio(sum(rollout.finish_reason in reasons for rollout in rollouts), len(rollouts))

    return {
        "length_mean": _mean(lengths),
        "length_p50": _quantile(lengths, 50),
        "length_p90": _quantile(lengths, 90),
        "length_p99": _quantile(lengths, 99),
        "length_max": _quantile(lengths, 100),
        "truncated_share": share_of(FinishReason.LENGTH),
        "interrupted_share": share_of(FinishReason.CANCELLED, FinishReason.DEADLINE),
        "failed_share": share_of(FinishReason.FAILED),
    }


def _times(rollouts: Sequence[RolloutSummary]) -> dict[str, float | None]:
    timeline = Timeline.from_intervals(
        (rollout.started_at, rollout.finished_at) for rollout in rollouts if rollout.started_at > 0
    )
    if timeline is None:
        return {}
    return {
        "makespan_s": timeline.makespan,
        "tail_s": timeline.tail,
        "tail_share": _ratio(timeline.tail, timeline.makespan),
        "longest_share": _ratio(timeline.longest, timeline.makespan),
        "tokens_per_s": _ratio(sum(rollout.num_tokens for rollout in rollouts), timeline.makespan),
    }


def _drafting(rollouts: Sequence[RolloutSummary]) -> dict[str, float | None]:
    num_steps = sum(rollout.num_decoding_steps for rollout in rollouts)
    num_accepted = sum(rollout.num_accepted_tokens for rollout in rollouts)
    num_sampled = num_steps + num_accepted

    def accepted_share(source: str) -> float | None:
        return _ratio(sum(rollout.accepted_by_source.get(source, 0) for rollout in rollouts), num_sampled)

    return {
        "accepted_per_step": _ratio(num_accepted, num_steps),
        "acceptance_rate": _ratio(num_accepted, sum(rollout.num_draft_tokens for rollout in rollouts)),
        "accepted_share": _ratio(num_accepted, num_sampled),
        "accepted_share_history": accepted_share("history"),
        "accepted_share_self": accepted_share("self"),
        "accepted_share_siblings": accepted_share("siblings"),
        "accepted_share_cross_problem": accepted_share("cross_problem"),
    }


def _versions(rollouts: Sequence[RolloutSummary]) -> dict[str, float | None]:
    staleness = [rollout.staleness for rollout in rollouts if rollout.staleness is not None]
    return {
        "weight_version": max((one.weight_version for one in rollouts if one.weight_version is not None), default=None),
        "staleness_mean": _mean(staleness),
        "staleness_max": max(staleness, default=None),
    }


def _rewards(rollouts: Sequence[RolloutSummary]) -> dict[str, float | None]:
    """Return metrics of the rewards.

    Raises:
        InvalidRequestError: a reward is not finite.
    """
    groups = _rewards_by_problem(rollouts)
    rewards = [reward for group in groups for reward in group]
    return {
        "reward_mean": _mean(rewards),
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "equal_reward_share": _ratio(sum(len(set(group)) == 1 for group in groups), len(groups)),
    }


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
