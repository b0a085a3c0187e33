"""The record of each epoch of a dataset job, and the figures derived from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rollout_api.protocol.status import EnvironmentErrors


class EpochMode(StrEnum):
    """How the rollouts of an epoch are drafted."""

    DAS = "das"
    """The job itself: drafts from the history and from the rollout's own text."""
    NON_SPECULATIVE = "non-speculative"
    """Baseline: an additional engine without speculation."""


@dataclass(frozen=True)
class RolloutRow:
    """One rollout in the report, or all turns of one trajectory together."""

    rollout_id: str
    problem_id: str
    length: int
    finish_reason: str
    num_decoding_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    reward: float | None
    started: float | None
    """Seconds since the epoch run began; None if an earlier run of the job produced the rollout."""
    finished: float | None
    error: str | None = None
    """Why the environment gave no reward, after the type of the error; None without an error."""


@dataclass
class EpochRun:
    """One epoch in one mode: one pass over all problems."""

    epoch: int
    mode: EpochMode
    checkpoint: str
    makespan: float = 0.0
    """Seconds from the first request to the last response, in this run of the job."""
    rollouts: list[RolloutRow] = field(default_factory=list)

    @property
    def from_this_run(self) -> list[RolloutRow]:
        """The rollouts that this run of the job produced."""
        return [row for row in self.rollouts if row.finished is not None]

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return sum(row.length for row in self.rollouts)

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens per second, counting the rollouts of this run of the job."""
        return sum(row.length for row in self.from_this_run) / self.makespan if self.makespan else None

    @property
    def steps(self) -> int:
        """Decoding steps of all rollouts, as counted by the engines that finished them."""
        return sum(row.num_decoding_steps for row in self.rollouts)

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens per decoding step of a rollout."""
        return sum(row.num_accepted_tokens for row in self.rollouts) / self.steps if self.steps else 0.0

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens per decoding step of a rollout."""
        return sum(row.num_draft_tokens for row in self.rollouts) / self.steps if self.steps else 0.0

    @property
    def longest(self) -> int:
        """Number of tokens of the longest response."""
        return max((row.length for row in self.rollouts), default=0)

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of all scored rollouts."""
        rewards = [row.reward for row in self.rollouts if row.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def as_json(self) -> dict[str, Any]:
        """Return the epoch run as data for JSON."""
        derived = (
            "tokens",
            "tokens_per_second",
            "steps",
            "accepted_per_step",
            "drafted_per_step",
            "longest",
            "mean_reward",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass
class JobReport:
    """The results of a finished dataset job."""

    name: str
    uid: str
    epoch_runs: list[EpochRun] = field(default_factory=list)
    rollouts_from_earlier_runs: int = 0
    """Number of rollouts that earlier runs of the same job had finished."""
    corrupt_records: int = 0
    """Number of history records that could not be read and were skipped."""
    dead_letters: int = 0
    """Number of finished rollouts that could not be read on their way to the history."""
    index_bytes: int = 0
    """Memory of the engines' suffix indexes at the end."""
    environment_errors: dict[str, EnvironmentErrors] = field(default_factory=dict)
    """Rollouts that got no reward from the environment, by type of error."""
    environment_restarts: int = 0
    """How often the environment's process was restarted in this run."""

    def find(self, epoch: int, mode: EpochMode) -> EpochRun | None:
        """Return the run of *epoch* in *mode*; None if there was none."""
        return next((run for run in self.epoch_runs if run.epoch == epoch and run.mode is mode), None)

    def speed_up(self, epoch: int) -> float | None:
        """Return the makespan of *epoch* in plain vLLM divided by the job's own; None if one is missing."""
        run, baseline = self.find(epoch, EpochMode.DAS), self.find(epoch, EpochMode.NON_SPECULATIVE)
        if run is None or baseline is None or not (run.makespan and baseline.makespan):
            return None
        return None if self.rollouts_from_earlier_runs else baseline.makespan / run.makespan

    def figures(self) -> list[dict[str, Any]]:
        """Return measured values with their targets: ``{name, value, unit, peer, op, target}`` each."""
        rows = []
        first, second = self.find(1, EpochMode.DAS), self.find(2, EpochMode.DAS)
        if first and second:
            rows.append(_ratio("accepted per step, epoch 2 / epoch 1", second, first, "epoch 1", 1.2))
        for epoch in range(1, 1 + max((run.epoch for run in self.epoch_runs), default=0)):
            if (speed_up := self.speed_up(epoch)) is not None:
                name = f"makespan, epoch {epoch}, plain vLLM / history"
                rows.append(_figure(name, speed_up, "plain vLLM", 1.0 if epoch > 1 else None))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        return {
            "name": self.name,
            "uid": self.uid,
            "rollouts_from_earlier_runs": self.rollouts_from_earlier_runs,
            "corrupt_records": self.corrupt_records,
            "dead_letters": self.dead_letters,
            "index_bytes": self.index_bytes,
            "environment_errors": self.environment_errors,
            "environment_restarts": self.environment_restarts,
            "epoch_runs": [run.as_json() for run in self.epoch_runs],
            "figures": self.figures(),
        }


def _ratio(name: str, ours: EpochRun, theirs: EpochRun, peer: str, target: float) -> dict[str, Any]:
    # JSON has no infinity: if the peer accepted nothing, it is counted as one accepted token.
    value = ours.accepted_per_step / (theirs.accepted_per_step or 1 / max(theirs.steps, 1))
    return _figure(name, value, peer, target)


def _figure(name: str, value: float, peer: str, target: float | None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": "ratio", "peer": peer, "op": ">=", "target": target}
