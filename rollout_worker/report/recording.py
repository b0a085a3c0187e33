"""All that a report about a job needs, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_api.protocol.timeline import EndedRollout, Measurement


class PastLength(NamedTuple):
    """The length of a rollout in the history, which may belong to an earlier job."""

    generation: int
    length: int
    """Number of tokens of the response."""
    cut_off: bool
    """Whether the rollout was cut off, so that its full length would have been larger."""
    reward: float | None


class DraftCounts(NamedTuple):
    """Verified draft tokens of one engine at one position of its drafts."""

    engine: str
    """Name of the engine."""
    position: int
    """The position, from 1."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class ViewedRollout:
    """A rollout whose text the report shows."""

    rollout_id: str
    weight_version: int
    """Weight version that sampled the last token."""
    generation: int
    step: int
    """Training step, or epoch of a dataset source; -1 if unknown."""
    finish_reason: str
    reward: float | None
    num_tokens: int
    """Number of tokens of the whole rollout."""
    tokens: list[str]
    """Text of each of the first tokens; their ids if no tokenizer was at hand."""
    sources: list[int]
    """Code of each of these tokens: which ones are accepted draft tokens, and of which source.

    See :mod:`rollout_api.protocol.draft_sources`. Empty if no draft was verified, or if it is unknown."""


@dataclass(frozen=True)
class ViewedProblem:
    """A problem whose rollouts the report shows."""

    problem_id: str
    prompt: str | None
    """Text of the prompt; None if it is unknown, because neither a job nor its history keeps prompts."""
    rollouts: list[ViewedRollout]
    """Rollouts of this and earlier jobs, oldest generation first."""
    num_omitted: int
    """Number of older rollouts that were left out because the recording would become too large."""


@dataclass(frozen=True)
class JobRecording:
    """A job as it was at one moment."""

    name: str
    """``namespace/name`` of the job; its uid if the name is unknown."""
    uid: str
    recorded_at: float
    """Unix time, by the clock of Redis."""
    release: str
    """Release of das-rollout that made the recording."""
    state: str
    """``running``, ``closed`` or ``failed``."""
    model: str
    history: str
    """Full name of the history."""
    is_dataset: bool
    """Whether the job samples a dataset, so that its training steps are epochs."""
    decoded: bool
    """Whether the shown tokens are texts; otherwise they are ids."""
    ended: list[EndedRollout] = field(default_factory=list)
    """The rollouts that have ended, in order. The oldest are missing if there were very many."""
    rewards: list[float | None] = field(default_factory=list)
    """Reward of each of these rollouts; None if the history has none."""
    measurements: list[Measurement] = field(default_factory=list)
    """Measurements in the order of their times."""
    generations: dict[int, int] = field(default_factory=dict)
    """Weight version of this job → its generation in the history."""
    lengths: dict[str, list[PastLength]] = field(default_factory=dict)
    """Problem of this job → lengths of its rollouts in the history, oldest generation first."""
    acceptance_by_age: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Age in generations → (drafted, accepted) draft tokens from the history, of all jobs that share the history."""
    positions: list[DraftCounts] = field(default_factory=list)
    """Draft tokens by position, of the engines that are still registered."""
    problems: list[ViewedProblem] = field(default_factory=list)
    """The problems whose rollouts the report shows."""
