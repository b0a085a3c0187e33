"""The training steps of a job, taken from a trace of recorded rollouts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.traces import Segment, Tokens, Trajectory, by_problem, checkpoints

Half = Literal["tuning", "report"]
"""The half of the problems that methods are tuned on, or the one whose figures are reported."""

MAX_SAMPLES = 32
"""Maximum number of rollouts of a problem in a training step."""
_LONG_TAIL_SAMPLES = 8
"""Number of rollouts of a problem in a training step with a long tail."""
_MEDIAN_TOKENS = 500.0
_LONG_TAIL_TOKENS = 4096
_LOOP_TOKENS = 1024
"""A response loops if its last tokens, at least this number, repeat a shorter text."""
_MAX_PERIOD = 256
_MIN_REPEATED = 0.95


@dataclass(frozen=True)
class Group:
    """The rollouts of one problem in a training step."""

    problem: str
    rollouts: tuple[Trajectory, ...]


@dataclass(frozen=True)
class TrainingStep:
    """The rollouts between two updates of the weights."""

    epoch: int
    block: int
    """Which problems it samples; each epoch samples every block once."""
    groups: tuple[Group, ...]

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts."""
        return sum(len(group.rollouts) for group in self.groups)


@dataclass(frozen=True)
class Job:
    """Consecutive training steps that visit the same problems in every epoch."""

    steps: tuple[TrainingStep, ...]
    spares: Mapping[tuple[str, int], tuple[Trajectory, ...]]
    """By problem and epoch: further recorded rollouts, which stand for those that are sampled only to draft from."""
    max_tokens: int
    """Length at which responses are cut off."""

    @property
    def longest_context(self) -> int:
        """The largest number of tokens of prompt and response, including one token that ends each turn."""
        trajectories = [rollout for step in self.steps for group in step.groups for rollout in group.rollouts]
        trajectories += [spare for spares in self.spares.values() for spare in spares]
        return max(
            len(trajectory.prompt) + sum(len(segment.tokens) + 1 for segment in trajectory.segments)
            for trajectory in trajectories
        )


def half_of(problem: str) -> Half:
    """Return the half that a problem belongs to; it depends on the problem's name only."""
    return "tuning" if hashlib.sha256(problem.encode()).digest()[0] % 2 == 0 else "report"


def loops(tokens: Tokens) -> bool:
    """Return whether a response ends in a loop: its last 1,024 tokens repeat a text of at most 256 tokens."""
    end = tokens[-_LOOP_TOKENS:]
    if len(end) < _LOOP_TOKENS:
        return False
    return any(float(np.mean(end[period:] == end[:-period])) >= _MIN_REPEATED for period in range(1, _MAX_PERIOD + 1))


def cut(trajectory: Trajectory, max_tokens: int) -> Trajectory:
    """Return a trajectory whose sampled tokens end at *max_tokens*."""
    segments, left = [], max_tokens
    for segment in trajectory.segments:
        if left <= 0:
            break
        tokens = segment.tokens[:left] if segment.generated else segment.tokens
        segments.append(Segment(segment.generated, tokens))
        left -= len(tokens) if segment.generated else 0
    while segments and not segments[-1].generated:
        segments.pop()
    return Trajectory(trajectory.problem, trajectory.sample, trajectory.checkpoint, trajectory.prompt, tuple(segments))


def make_job(
    trajectories: Sequence[Trajectory],
    half: Half,
    *,
    blocks: int = 5,
    max_blocks: int | None = None,
    max_tokens: int = 1 << 20,
    without_loops: bool = False,
) -> Job:
    """Return the job that a trace stands for.

    If the trace has checkpoints with several samples of a problem, each checkpoint is an epoch. Otherwise all samples
    of a problem are divided between two epochs. Of the samples of a problem in an epoch, a third is spare, so that no
    rollout is drafted from itself.

    Args:
        trajectories: all trajectories of the trace.
        half: the half of the problems that the job samples.
        blocks: number of training steps in each epoch.
        max_blocks: use only the first blocks.
        max_tokens: length at which responses are cut off.
        without_loops: leave out responses that end in a loop.
    """
    kept = [cut(trajectory, max_tokens) for trajectory in trajectories if half_of(trajectory.problem) == half]
    if without_loops:
        kept = [trajectory for trajectory in kept if not any(loops(segment.tokens) for segment in trajectory.segments)]
    problems = by_problem(kept)
    epochs = {problem: _epochs(samples) for problem, samples in problems.items()}
    num_epochs = max(map(len, epochs.values()))
    names = sorted(problems, key=lambda name: hashlib.sha256(name.encode()).digest())
    spares: dict[tuple[str, int], tuple[Trajectory, ...]] = {}
    steps = []
    for epoch in range(num_epochs):
        for block in range(blocks if max_blocks is None else min(max_blocks, blocks)):
            groups = []
            for name in names[block::blocks]:
                samples = epochs[name][epoch] if epoch < len(epochs[name]) else []
                used = min(MAX_SAMPLES, len(samples) - len(samples) // 3)
                spares[name, epoch] = tuple(samples[used:])
                if used:
                    groups.append(Group(name, tuple(samples[:used])))
            if groups:
                steps.append(TrainingStep(epoch, block, tuple(groups)))
    longest = max(trajectory.generated for trajectory in kept)
    return Job(tuple(steps), spares, min(max_tokens, longest))


def make_long_tail_job(trajectories: Sequence[Trajectory], half: Half, *, rollouts: int, seed: int) -> Job:
    """Return a job whose lengths have a long tail, with recorded texts.

    The logarithm of a length is normally distributed, with the median 500 and a standard deviation of 1. Half of its
    variance is between problems. Lengths are cut off at 4,096 tokens. A problem has eight rollouts in each epoch, which
    consist of its recorded rollouts of one checkpoint, one after the other; each is used once. Where these do not
    suffice, the last rollouts of a problem are shorter, or missing.

    Args:
        trajectories: all trajectories of a trace with checkpoints.
        half: the half of the problems that the job samples.
        rollouts: number of rollouts of a training step.
        seed: determines the lengths.
    """
    generator = np.random.default_rng([seed, half == "report"])
    problems = by_problem(trajectory for trajectory in trajectories if half_of(trajectory.problem) == half)
    names = sorted(problems, key=lambda name: hashlib.sha256(name.encode()).digest())
    per_step = rollouts // _LONG_TAIL_SAMPLES
    names = names[: len(names) // per_step * per_step]
    means = np.log(_MEDIAN_TOKENS) + math.sqrt(0.5) * generator.standard_normal(len(names))
    steps = []
    for epoch in range(min(len(_epochs(problems[name])) for name in names)):
        groups = []
        for name, mean in zip(names, means.tolist(), strict=True):
            recorded = _epochs(problems[name])[epoch]
            text = np.concatenate([segment.tokens for one in recorded for segment in one.segments])
            logs = mean + math.sqrt(0.5) * generator.standard_normal(_LONG_TAIL_SAMPLES)
            lengths = np.clip(np.exp(logs), 1, _LONG_TAIL_TOKENS).astype(int)
            parts = np.split(text, np.cumsum(lengths))[:_LONG_TAIL_SAMPLES]
            rolled = (
                Trajectory(name, sample, recorded[0].checkpoint, recorded[0].prompt, (Segment(True, part),))
                for sample, part in enumerate(parts)
            )
            groups.append(Group(name, tuple(one for one in rolled if one.generated)))
        steps += [
            TrainingStep(epoch, block, tuple(groups[block * per_step : (block + 1) * per_step]))
            for block in range(len(names) // per_step)
        ]
    return Job(tuple(steps), {}, _LONG_TAIL_TOKENS)


def _epochs(samples: list[Trajectory]) -> list[list[Trajectory]]:
    """Divide the samples of a problem between epochs."""
    names = checkpoints(samples)
    by_checkpoint = [[sample for sample in samples if sample.checkpoint == name] for name in names]
    if len(names) > 1 and min(map(len, by_checkpoint)) > 1:
        return by_checkpoint
    ordered = sorted(
        samples, key=lambda sample: hashlib.sha256(f"{sample.checkpoint}/{sample.sample}".encode()).digest()
    )
    middle = -(-len(ordered) // 2)
    return [ordered[:middle], ordered[middle:]]
