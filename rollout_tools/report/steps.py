"""The training steps of a job as numbers: rollouts, makespans and tails, rewards, staleness, and estimates of the time
that they would have taken without drafts by the engines' cost models."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from rollout_api.protocol.messages import DraftMode, FinishReason, Purpose
from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_api.step_metrics import Timeline
from rollout_tools.report.recording import JobRecording


@dataclass(frozen=True)
class Scored:
    """A rollout with its reward."""

    rollout: EndedRollout
    reward: float | None

    @property
    def sampled(self) -> bool:
        """Whether an engine has sampled it."""
        return bool(self.rollout.engine) and self.rollout.started_at > 0

    @property
    def started(self) -> float:
        """Unix time at which an engine started it, at most the time at which it ended.

        The engine's clock may differ from that of Redis.
        """
        return min(self.rollout.started_at, self.rollout.finished_at)

    @property
    def cut_off(self) -> bool:
        """Whether it would have been longer."""
        return self.rollout.finish_reason == FinishReason.LENGTH


@dataclass(frozen=True)
class Step:
    """A training step, or an epoch of a dataset source, in one draft mode."""

    number: int
    """Step of the requests; if they have none, the weight version that the first rollout began with."""
    purpose: str
    draft_mode: str
    scored: list[Scored]
    """Its rollouts, in the order of their ends."""

    @cached_property
    def start(self) -> float:
        """Unix time at which the first request arrived."""
        return min(one.rollout.arrived_at for one in self.scored)

    @cached_property
    def end(self) -> float:
        """Unix time at which the last rollout ended."""
        return max(one.rollout.finished_at for one in self.scored)

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end."""
        return self.end - self.start

    @cached_property
    def sampled(self) -> list[Scored]:
        """The rollouts that an engine has sampled."""
        return [one for one in self.scored if one.sampled]

    @property
    def intervals(self) -> list[tuple[float, float]]:
        """Unix times of the start and the end of each sampled rollout."""
        return [(one.started, one.rollout.finished_at) for one in self.sampled]

    @cached_property
    def tail_start(self) -> float:
        """Unix time at which the tail begins; the end if no rollout was sampled."""
        timeline = Timeline.from_intervals(self.intervals)
        return self.end if timeline is None else timeline.tail_start

    @property
    def tail(self) -> float:
        """Seconds of the tail."""
        return self.end - self.tail_start

    @property
    def tail_share(self) -> float:
        """Share of the makespan that belongs to the tail."""
        return self.tail / self.makespan if self.makespan > 0 else 0.0

    @cached_property
    def running(self) -> list[RunningCount]:
        """Number of running rollouts over time."""
        return running_counts(self.intervals)

    @cached_property
    def tokens(self) -> int:
        """Number of response tokens."""
        return sum(one.rollout.tokens for one in self.scored)

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of the makespan."""
        return self.tokens / self.makespan if self.makespan > 0 else 0.0

    @cached_property
    def decoding_steps(self) -> int:
        """Decoding steps of all rollouts."""
        return sum(one.rollout.decoding_steps for one in self.scored)

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens per decoding step of a rollout."""
        accepted = sum(one.rollout.accepted_tokens for one in self.scored)
        return accepted / self.decoding_steps if self.decoding_steps else 0.0

    @property
    def cut_off_share(self) -> float:
        """Share of the rollouts that reached ``max_tokens``."""
        return sum(one.cut_off for one in self.scored) / len(self.scored)

    @cached_property
    def newest_version(self) -> int:
        """Newest weight version that sampled a token; -1 without tokens."""
        versions = [one.rollout.newest_version for one in self.scored]
        return max((version for version in versions if version is not None), default=-1)

    @cached_property
    def problems(self) -> Counter[str]:
        """Number of rollouts of each problem."""
        return Counter(one.rollout.problem_id for one in self.scored)


@dataclass(frozen=True)
class Comparison:
    """A training step, and the same problems sampled with the same weights in other draft modes."""

    step: Step
    baselines: dict[str, Step]
    """Draft mode → the step that measured it."""


def steps_of(recording: JobRecording) -> list[Step]:
    """Return all steps in the order of their beginnings."""
    first_version: dict[str, int] = {}
    for rollout in recording.ended:
        version = rollout.oldest_version
        if version is not None:
            first_version[rollout.request_id] = min(version, first_version.get(rollout.request_id, version))
    groups: defaultdict[tuple[str, str, int], list[Scored]] = defaultdict(list)
    for rollout, reward in zip(recording.ended, recording.rewards, strict=True):
        number = rollout.step if rollout.step is not None else first_version.get(rollout.request_id, -1)
        groups[rollout.purpose, rollout.draft_mode, number].append(Scored(rollout, reward))
    steps = [Step(number, purpose, mode, scored) for (purpose, mode, number), scored in groups.items()]
    return sorted(steps, key=lambda step: (step.start, step.number))


def training_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps whose rollouts train the policy, in order of their numbers."""
    return sorted((step for step in steps if step.purpose == Purpose.TRAIN), key=lambda step: step.number)


def compare(steps: Sequence[Step]) -> list[Comparison]:
    """Return each training step with the baselines that ``rollout run`` has measured for it.

    A baseline has the same number of rollouts of the same problems, with the same weights, in another draft mode.
    """
    comparisons = []
    for step in training_steps(steps):
        baselines = {
            other.draft_mode: other
            for other in steps
            if other.purpose == Purpose.EVAL
            and other.draft_mode != step.draft_mode
            and (other.newest_version, other.problems) == (step.newest_version, step.problems)
        }
        comparisons.append(Comparison(step, dict(sorted(baselines.items()))))
    return comparisons


def mode_name(draft_mode: str) -> str:
    """Return what the report calls a draft mode."""
    names: dict[str, str] = {
        DraftMode.HISTORY: "all sources",
        DraftMode.OWN_TEXT: "own text only",
        DraftMode.OFF: "no drafts",
    }
    return names.get(draft_mode, draft_mode)


@dataclass(frozen=True)
class RunningCount:
    """The number of running rollouts from one moment to the next."""

    time: float
    count: int


def running_counts(intervals: Iterable[tuple[float, float]]) -> list[RunningCount]:
    """Return how many of the intervals (start, end) contain each moment, as a step function that ends with 0."""
    changes: dict[float, int] = {}
    for start, end in intervals:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    counts: list[RunningCount] = []
    running = 0
    for time, change in sorted(changes.items()):
        if change:
            running += change
            counts.append(RunningCount(time, running))
    return counts


def thinned(counts: Sequence[RunningCount], most: int = 1500) -> list[RunningCount]:
    """Return at most about *most* of the counts, with the largest and the last one of each part."""
    if len(counts) <= most:
        return list(counts)
    size = -(-2 * len(counts) // most)
    kept: list[RunningCount] = []
    for start in range(0, len(counts), size):
        part = counts[start : start + size]
        largest = max(part, key=lambda one: one.count)
        kept += [largest] if largest is part[-1] else [largest, part[-1]]
    return kept


_MIN_TIMED_S = 1.0
"""Seconds of decoding steps for one slowdown, because single steps differ much from the cost model."""


class TimedSteps(NamedTuple):
    """The decoding steps of an engine in some time."""

    start: float | None
    """Unix time; None if it is unknown."""
    end: float
    seconds: float
    """Duration of the steps."""
    without_drafts: float
    """Seconds that the same tokens would have taken without drafts, by the engine's cost model."""


class Slowdown:
    """How many times as long everything on an engine would have taken without drafts, over time.

    Only decoding steps take longer without drafts; whatever else happens takes as long as it did. Before the first and
    after the last of the times with timed steps, the slowdown is that of the nearest.
    """

    def __init__(self, times: Sequence[float], ratios: Sequence[float]) -> None:
        """Prepare the sums of the stretched times.

        Args:
            times: time at which each ratio ends to apply; the last one applies forever.
            ratios: the slowdown until each of these times.
        """
        self._times, self._ratios = list(times), list(ratios)
        parts = [
            (end - begin) * ratio for (begin, end), ratio in zip(pairwise(self._times), self._ratios[1:], strict=True)
        ]
        self._sums = list(accumulate(parts, initial=0.0))

    def stretched(self, start: float, end: float) -> float:
        """Return the seconds that what took from *start* to *end* would have taken without drafts."""
        return self._since_first(end) - self._since_first(start) if self._ratios else end - start

    def _since_first(self, time: float) -> float:
        """Return the stretched time since the end of the first ratio; negative before it."""
        index = min(bisect_right(self._times, time), len(self._times) - 1)
        if index == 0:
            return (time - self._times[0]) * self._ratios[0]
        return self._sums[index - 1] + (time - self._times[index - 1]) * self._ratios[index]


def timed_steps(measurements: Iterable[Measurement]) -> dict[str, list[TimedSteps]]:
    """Return the decoding steps of each engine, by its name, in times with at least a second of them."""
    found: defaultdict[str, list[TimedSteps]] = defaultdict(list)
    known: dict[str, tuple[float, EngineMeasurement]] = {}
    for measurement in measurements:
        for engine in measurement.engines:
            since, before = known.get(engine.name, (None, None))
            timed, predicted = increase(before, engine)
            if timed >= _MIN_TIMED_S:
                found[engine.name].append(TimedSteps(since, measurement.time, timed, predicted))
            if timed >= _MIN_TIMED_S or not timed:
                known[engine.name] = measurement.time, engine
    return dict(found)


def slowdowns(measurements: Iterable[Measurement]) -> dict[str, Slowdown]:
    """Return the slowdown of each engine, by its name. An engine with less than a second of steps has none."""
    return {name: _slowdown(parts) for name, parts in timed_steps(measurements).items()}


def _slowdown(parts: Iterable[TimedSteps]) -> Slowdown:
    times: list[float] = []
    ratios: list[float] = []
    for steps in parts:
        seconds = steps.seconds
        if steps.start is not None:
            if not times or steps.start > times[-1]:  # the engine was idle
                times.append(steps.start)
                ratios.append(1.0)
            # An engine measures its counters a little earlier than the job.
            seconds = max(seconds, steps.end - steps.start)
        times.append(steps.end)
        ratios.append(1 + (steps.without_drafts - steps.seconds) / seconds)
    return Slowdown(times, ratios)


def increase(before: EngineMeasurement | None, after: EngineMeasurement) -> tuple[float, float]:
    """Return the increases of the measured and of the predicted seconds; an engine that has restarted counts anew."""
    if before is None or after.timed_seconds < before.timed_seconds:
        return after.timed_seconds, after.timed_seconds_without_drafts
    return (
        after.timed_seconds - before.timed_seconds,
        after.timed_seconds_without_drafts - before.timed_seconds_without_drafts,
    )


def intervals_without_drafts(step: Step, by_engine: dict[str, Slowdown]) -> list[tuple[float, float]]:
    """Estimate when each rollout of a step would have started and ended without drafts.

    The time of each engine is stretched by its slowdown from the start of the step on, so that a rollout that waits for
    the end of others starts later, too.

    Returns:
        Start and end of each sampled rollout, in seconds since the start of the step.
    """
    unknown = Slowdown((), ())

    def stretched(engine: str, time: float) -> float:
        return by_engine.get(engine, unknown).stretched(step.start, max(step.start, time))

    return [
        (stretched(one.rollout.engine_name, one.started), stretched(one.rollout.engine_name, one.rollout.finished_at))
        for one in step.sampled
    ]


def makespan_without_drafts(step: Step, by_engine: dict[str, Slowdown]) -> float | None:
    """Estimate the makespan of a step without drafts; None if no engine has measured its steps."""
    if not by_engine:
        return None
    return max((end for _, end in intervals_without_drafts(step, by_engine)), default=None)


class StepRewards(NamedTuple):
    """The rewards of a step."""

    mean: float
    error: float
    """Standard error of the mean; 0 for a single reward."""
    equal_groups: float | None
    """Share of the groups whose rewards are all equal (GRPO learns nothing from them); None without groups."""


def rewards_of(step: Step) -> StepRewards | None:
    """Return the rewards of a step; None if it has none."""
    rewards = [one.reward for one in step.scored if one.reward is not None]
    if not rewards:
        return None
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in step.scored:
        if one.reward is not None:
            groups[one.rollout.problem_id].append(one.reward)
    compared = [group for group in groups.values() if len(group) > 1]
    equal = sum(min(group) == max(group) for group in compared) / len(compared) if compared else None
    error = stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return StepRewards(fmean(rewards), error, equal)


class PublishedVersions:
    """The newest published weight version at each moment."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._times: list[float] = []
        self._versions: list[int] = []
        for measurement in measurements:
            if not self._versions or measurement.weight_version > self._versions[-1]:
                self._times.append(measurement.time)
                self._versions.append(measurement.weight_version)

    def at(self, time: float) -> int:
        """Return the newest version that was published at *time*."""
        index = bisect_right(self._times, time)
        return self._versions[index - 1] if index else 0


def staleness_of(step: Step, published: PublishedVersions) -> Counter[int]:
    """Return the number of rollouts by the staleness of their oldest token."""
    counts: Counter[int] = Counter()
    for one in step.sampled:
        oldest = one.rollout.oldest_version
        if oldest is not None:
            counts[max(0, published.at(one.rollout.finished_at) - oldest)] += 1
    return counts
