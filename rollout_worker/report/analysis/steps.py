"""The training steps of a job: which rollouts belong to each, its makespan, and how it was measured otherwise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rollout_api.protocol.messages import DraftMode, FinishReason, Purpose
from rollout_api.protocol.timeline import EndedRollout
from rollout_worker.report.recording import JobRecording


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
    """Step of the requests; the weight version with which the first rollout began if they have none."""
    purpose: str
    draft_mode: str
    scored: list[Scored]
    """Its rollouts, in the order in which they ended."""

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
    """Draft mode → the step in which it was measured."""


def steps_of(recording: JobRecording) -> list[Step]:
    """Return all steps in the order in which they began."""
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
