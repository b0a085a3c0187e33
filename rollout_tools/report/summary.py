"""The figures at the top of a report, and sentences about what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.protocol.messages import DraftMode
from rollout_tools.report.engines import EngineTime, engine_times, interruptions
from rollout_tools.report.recording import JobRecording
from rollout_tools.report.steps import (
    Comparison,
    Step,
    compare,
    makespan_without_drafts,
    rewards_of,
    slowdowns,
    steps_of,
    training_steps,
)

_NOTABLE_SHARE = 0.05
"""Minimum share of the time or of the rollouts for mentioning something."""
_EQUAL = 0.01
"""Relative difference of makespans below which they are called the same."""
_NOTABLE_CHANGE = 0.1
"""Minimum relative change of the accepted tokens per step for mentioning it."""
_LARGE_TAIL = 0.3
"""Minimum share of the makespan for mentioning a tail."""


@dataclass(frozen=True)
class Summary:
    """The most important figures of a job's training steps."""

    num_steps: int
    num_rollouts: int
    num_tokens: int
    seconds: float
    """Sum of the makespans."""
    tokens_per_second: float
    """Response tokens per second of the makespans."""
    accepted_per_step: float
    """Accepted draft tokens per decoding step of a rollout."""
    estimated_saving: float | None
    """Share of the makespan that drafting saved, estimated by the engines' cost models; None if it is unknown."""
    measured_saving: float | None
    """Share of the makespan that drafting saved, compared with measured baselines without drafts; None without any."""
    tail: float
    """Share of the makespans that belongs to tails."""


def summarize(recording: JobRecording) -> Summary:
    """Return the figures of a job. If it has no training steps, its evaluation counts instead."""
    all_steps = steps_of(recording)
    comparisons = compare(all_steps)
    steps = training_steps(all_steps) or all_steps
    seconds = sum(step.makespan for step in steps)
    decoding_steps = sum(step.decoding_steps for step in steps)
    accepted = sum(step.accepted_per_step * step.decoding_steps for step in steps)
    tokens = sum(step.tokens for step in steps)
    return Summary(
        num_steps=len(steps),
        num_rollouts=sum(len(step.scored) for step in steps),
        num_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        accepted_per_step=accepted / decoding_steps if decoding_steps else 0.0,
        estimated_saving=_estimated_saving(recording, steps),
        measured_saving=_measured_saving(comparisons),
        tail=sum(step.tail for step in steps) / seconds if seconds else 0.0,
    )


def _estimated_saving(recording: JobRecording, steps: Sequence[Step]) -> float | None:
    by_engine = slowdowns(recording.measurements)
    estimates = [makespan_without_drafts(step, by_engine) for step in steps]
    without = sum(estimate for estimate in estimates if estimate is not None)
    if not without:
        return None
    return (
        1
        - sum(step.makespan for step, estimate in zip(steps, estimates, strict=True) if estimate is not None) / without
    )


def _measured_saving(comparisons: Sequence[Comparison]) -> float | None:
    pairs = [(one.step, one.baselines[DraftMode.OFF]) for one in comparisons if DraftMode.OFF in one.baselines]
    without = sum(baseline.makespan for _, baseline in pairs)
    return 1 - sum(step.makespan for step, _ in pairs) / without if without else None


def findings(recording: JobRecording, summary: Summary) -> list[str]:
    """Return what stands out in a recording with this summary, as sentences."""
    all_steps = steps_of(recording)
    steps = training_steps(all_steps) or all_steps
    unit = "epoch" if recording.is_dataset else "step"
    sentences = [*_saving(summary), *_growth(steps, unit)]
    for engine, time in engine_times(recording.measurements, recording.ended).items():
        sentences += _engine_sentences(engine, time)
    sentences += _rollout_sentences(steps)
    sentences += _tail_sentences(steps, unit)
    for start, end in interruptions(recording.measurements):
        sentences.append(f"The job was interrupted for {_duration(end - start)}, in which no coordinator ran.")
    return sentences


def _saving(summary: Summary) -> list[str]:
    measured = summary.measured_saving
    if measured is None:
        return []
    if abs(measured) < _EQUAL:
        result = "took the same time in total"
    else:
        result = f"took {abs(measured):.0%} {'less' if measured > 0 else 'more'} time in total"
    return [f"The same rollouts were sampled without drafts as well. With drafts, they {result}."]


def _growth(steps: Sequence[Step], unit: str) -> list[str]:
    drafted = [step for step in steps if step.decoding_steps]
    if len(drafted) < 2:
        return []
    first, last = drafted[0], drafted[-1]
    if abs(last.accepted_per_step - first.accepted_per_step) <= _NOTABLE_CHANGE * first.accepted_per_step:
        return []
    return [
        f"Accepted draft tokens per decoding step went from {first.accepted_per_step:.2f} in {unit} {first.number} to "
        f"{last.accepted_per_step:.2f} in {unit} {last.number}."
    ]


def _engine_sentences(engine: str, time: EngineTime) -> list[str]:
    sentences = []
    if time.busy and time.disabled / time.busy >= _NOTABLE_SHARE:
        sentences.append(
            f"Drafting was disabled for {time.disabled / time.busy:.0%} of the time in which {engine} had rollouts, "
            "because it did not pay."
        )
    if time.total and time.idle_with_waiting / time.total >= _NOTABLE_SHARE:
        sentences.append(
            f"{engine} was idle for {_duration(time.idle_with_waiting)} ({time.idle_with_waiting / time.total:.0%} of "
            "its time) although rollouts were waiting."
        )
    if time.total and time.idle_in_tail / time.total >= _NOTABLE_SHARE:
        sentences.append(
            f"{engine} was idle for {_duration(time.idle_in_tail)} ({time.idle_in_tail / time.total:.0%} of its time) "
            "while other engines finished the last rollouts of a step."
        )
    if time.total and time.weights / time.total >= _NOTABLE_SHARE:
        sentences.append(
            f"{engine} paused for weight updates for {_duration(time.weights)} ({time.weights / time.total:.0%} of its "
            "time)."
        )
    return sentences


def _rollout_sentences(steps: Sequence[Step]) -> list[str]:
    scored = [one for step in steps for one in step.scored]
    cut_off = sum(one.cut_off for one in scored) / len(scored) if scored else 0.0
    sentences = [f"{cut_off:.0%} of the rollouts were cut off at max_tokens."] if cut_off >= _NOTABLE_SHARE else []
    reasons = [one.rollout.finish_reason for one in scored]
    for reason, text in (
        ("failed", "failed"),
        ("deadline", "ended at a deadline"),
        ("cancelled", "were cancelled"),
    ):
        if count := reasons.count(reason):
            sentences.append(f"Rollouts that {text}: {count:,}.")
    rewards = [rewards for step in steps if (rewards := rewards_of(step)) is not None]
    if len(rewards) >= 2:
        sentences.append(f"The mean reward went from {rewards[0].mean:.2f} to {rewards[-1].mean:.2f}.")
    return sentences


def _tail_sentences(steps: Sequence[Step], unit: str) -> list[str]:
    longest = max(steps, key=lambda step: step.tail_share, default=None)
    if longest is None or longest.tail_share < _LARGE_TAIL:
        return []
    return [
        f"The longest tail took {longest.tail_share:.0%} of {unit} {longest.number}: for "
        f"{_duration(longest.tail)}, fewer than half as many rollouts were running as at "
        "its peak."
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
