"""What a job did, epoch by epoch, and the figures made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    """How the rollouts of one pass over the problems were made."""

    DAS = "das"
    """The job itself: drafts from the history and from the rollout's own text."""
    SELF = "self"
    """Compared with: the same engine, drafts from the rollout's own text alone."""
    PLAIN = "plain"
    """Compared with: a second engine with no speculation configured."""


@dataclass(frozen=True)
class RolloutRow:
    """One rollout, as the report lists it."""

    rollout_id: str
    problem_id: str
    length: int
    finish_reason: str
    steps: int
    drafted: int
    accepted: int
    reward: float | None
    started: float | None
    """Seconds since the pass began; None if an earlier run made it."""
    finished: float | None


@dataclass
class Pass:
    """One pass over all problems: an epoch in one mode."""

    epoch: int
    mode: Mode
    checkpoint: str
    makespan: float = 0.0
    """Seconds from the first request to the last response, in this run."""
    rollouts: list[RolloutRow] = field(default_factory=list)

    @property
    def here(self) -> list[RolloutRow]:
        """The rollouts that this run made."""
        return [row for row in self.rollouts if row.finished is not None]

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(row.length for row in self.rollouts)

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens a second, of the rollouts made in this run."""
        return sum(row.length for row in self.here) / self.makespan if self.makespan else None

    @property
    def steps(self) -> int:
        """Decoding steps of all rollouts, by the engines that ended them."""
        return sum(row.steps for row in self.rollouts)

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens for each decoding step of a rollout."""
        return sum(row.accepted for row in self.rollouts) / self.steps if self.steps else 0.0

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens for each decoding step of a rollout."""
        return sum(row.drafted for row in self.rollouts) / self.steps if self.steps else 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max((row.length for row in self.rollouts), default=0)

    @property
    def mean_reward(self) -> float | None:
        """Mean over all scored rollouts."""
        rewards = [row.reward for row in self.rollouts if row.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
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
    """Everything that a finished job has to show."""

    name: str
    uid: str
    passes: list[Pass] = field(default_factory=list)
    rollouts_done_before: int = 0
    """Rollouts that an earlier run of the same job had finished."""
    corrupt_records: int = 0
    """History records that could not be read and were skipped."""
    dead_letters: int = 0
    """Finished rollouts that could not be read on their way into the history."""
    index_bytes: int = 0
    """Memory of the draft index at the end."""

    def find(self, epoch: int, mode: Mode) -> Pass | None:
        """The pass of *epoch* in *mode*, if it was made."""
        return next((p for p in self.passes if p.epoch == epoch and p.mode is mode), None)

    def figures(self) -> list[dict[str, Any]]:
        """What was promised beside what was measured: ``{name, value, unit, peer, op, target}`` each."""
        rows = []
        first, second = self.find(1, Mode.DAS), self.find(2, Mode.DAS)
        own = self.find(2, Mode.SELF)
        if first and second:
            rows.append(_ratio("accepted per step, epoch 2 / epoch 1", second, first, "epoch 1", 1.2))
        if second and own:
            rows.append(_ratio("accepted per step, epoch 2, history / own text", second, own, "own text only", 1.2))
        for done in self.passes:
            plain = self.find(done.epoch, Mode.PLAIN)
            if done.mode is Mode.DAS and plain and done.makespan and plain.makespan and not self.rollouts_done_before:
                value = plain.makespan / done.makespan
                name = f"makespan, epoch {done.epoch}, plain vLLM / das"
                rows.append(_figure(name, value, "ratio", "plain vLLM", 1.0 if done.epoch > 1 else None))
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "name": self.name,
            "uid": self.uid,
            "rollouts_done_before": self.rollouts_done_before,
            "corrupt_records": self.corrupt_records,
            "dead_letters": self.dead_letters,
            "index_bytes": self.index_bytes,
            "passes": [done.as_json() for done in self.passes],
            "figures": self.figures(),
        }


def _ratio(name: str, ours: Pass, theirs: Pass, peer: str, target: float) -> dict[str, Any]:
    # JSON knows no infinity: against a peer that accepted nothing, one token in all stands for its count
    value = ours.accepted_per_step / (theirs.accepted_per_step or 1 / max(theirs.steps, 1))
    return _figure(name, value, "ratio", peer, target)


def _figure(name: str, value: float, unit: str, peer: str, target: float | None) -> dict[str, Any]:
    shown: Sequence[float | None] = (round(value, 4), target)
    return {"name": name, "value": shown[0], "unit": unit, "peer": peer, "op": ">=", "target": shown[1]}
