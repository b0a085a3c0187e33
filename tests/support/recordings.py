"""Recordings of a small job that never ran, for the tests of reports."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_tools.report.recording import (
    ClassCounts,
    DraftCounts,
    JobRecording,
    PastLength,
    ViewedProblem,
    ViewedRollout,
)

START = 1_700_000_000.0


def ended(**changes: Any) -> EndedRollout:
    """Return a rollout of 10 tokens that ran from second 1 to second 2 of the job."""
    common: dict[str, Any] = {
        "request_id": "trainer:1:0",
        "sample": 0,
        "turn": 0,
        "problem_id": "p",
        "step": 1,
        "purpose": "train",
        "draft_mode": "history",
        "finish_reason": "stop",
        "engine": "engine-0-1a2b",
        "started_at": START + 1,
        "prompt_tokens": 4,
        "tokens": 10,
        "oldest_version": 1,
        "newest_version": 1,
        "decoding_steps": 5,
        "draft_tokens": 8,
        "accepted_tokens": 5,
        "draft_tokens_by_source": {"history": 6, "self": 2},
        "accepted_tokens_by_source": {"history": 4, "self": 1},
        "arrived_at": START,
        "finished_at": START + 2,
    }
    return EndedRollout(**{**common, **changes})


def engine(name: str = "engine-0", **changes: Any) -> EngineMeasurement:
    """Return a measurement of an engine whose counters are 0."""
    zeros = {one.name: 0.0 for one in fields(EngineMeasurement)}
    return EngineMeasurement(**{**zeros, "name": name, "version": 1, "assigned": 0, **changes})


def measurement(time: float, engines: list[EngineMeasurement], **changes: Any) -> Measurement:
    """Return a measurement at a number of seconds since the start of the job."""
    common: dict[str, Any] = {
        "time": START + time,
        "state": "running",
        "weight_version": 1,
        "requests": 0,
        "waiting": 0,
        "assigned": sum(one.assigned for one in engines),
        "done": 0,
        "tokens_per_second": 0.0,
        "saved": None,
        "remaining_seconds": None,
        "unread_bytes": 0,
        "engines": engines,
    }
    return Measurement(**{**common, **changes})


def recording(rollouts: list[EndedRollout], **changes: Any) -> JobRecording:
    """Return a recording of these rollouts, without rewards unless they are given."""
    common: dict[str, Any] = {
        "name": "default/job",
        "uid": "uid",
        "recorded_at": START + 100,
        "release": "0.1.0",
        "state": "closed",
        "model": "das/tiny",
        "history": "default/job",
        "is_dataset": False,
        "decoded": True,
        "ended": rollouts,
        "rewards": [None] * len(rollouts),
    }
    return JobRecording(**{**common, **changes})


def small_job(problem_id: str = "sums/3", text: str = " 4") -> JobRecording:
    """Return a recording of three epochs on two engines, in which everything occurs that a report can show.

    Args:
        problem_id: id of the first problem.
        text: text of a token of its rollouts.
    """
    random = Random(0)
    problems = [problem_id, "products/1"]
    rollouts, rewards, lengths = [], [], {problem: [] for problem in problems}  # type: ignore[var-annotated]
    for epoch in (1, 2, 3):
        for mode, purpose in (("history", "train"), ("own_text", "eval"), ("off", "eval")):
            begin = START + 60 * epoch + {"history": 0, "own_text": 20, "off": 40}[mode]
            for index, problem in enumerate(problems):
                for sample in range(8):
                    length = random.randrange(20, 200)
                    seconds = length / (10 + 3 * epoch * (mode == "history"))
                    reward = float(random.random() < epoch / 4)
                    rollouts.append(
                        ended(
                            request_id=f"dataset:{epoch}:{mode}:{index}",
                            sample=sample,
                            problem_id=problem,
                            step=epoch if purpose == "train" else 10 * epoch + len(mode),
                            purpose=purpose,
                            draft_mode=mode,
                            finish_reason="length" if length > 190 else "stop",
                            engine=f"engine-{sample % 2}-1a2b",
                            started_at=begin + 0.2,
                            tokens=length,
                            oldest_version=epoch,
                            newest_version=epoch,
                            decoding_steps=length // 2,
                            arrived_at=begin,
                            finished_at=begin + 0.2 + seconds,
                        )
                    )
                    rewards.append(reward if purpose == "train" else None)
                    if purpose == "train":
                        lengths[problem].append(PastLength(epoch, length, length > 190, reward))
    measurements = [
        measurement(
            60.0 + second,
            [
                engine(
                    name,
                    version=1 + second // 60,
                    assigned=8 * (second % 20 < 12),
                    drafting_seconds=0.1 * second,
                    timed_seconds=float(second // 3),
                    timed_seconds_without_drafts=1.4 * (second // 3),
                    drafting_disabled=float(100 < second < 130),
                    drafting_stops=float(second > 100),
                    trial_tokens=4.0 * max(0, min(second, 130) - 100),
                    cost_base_seconds=0.004,
                    cost_token_seconds=0.0002,
                    weights_gap_seconds=0.5,
                )
                for name in ("engine-0", "engine-1")
            ],
            weight_version=1 + second // 60,
            waiting=3 * (second % 20 < 3),
        )
        for second in range(180)
    ]
    viewed = [
        ViewedRollout(
            rollout_id=f"uid/dataset:{epoch}:history:0/{sample}/0",
            weight_version=epoch,
            generation=epoch,
            finish_reason="stop",
            reward=float(sample),
            num_tokens=7,
            tokens=["2", "+", "2", " =", text, f" ({epoch}.{sample})", "\n"],
            sources=[0, 1, 1, 2, 0, 3, 4],
        )
        for epoch in (1, 2, 3)
        for sample in range(2)
    ]
    return recording(
        rollouts,
        rewards=rewards,
        is_dataset=True,
        measurements=measurements,
        lengths=lengths,
        positions=[
            DraftCounts("engine-0", "16+" if position == 16 else str(position), 200 - 10 * position, 120 - 7 * position)
            for position in range(1, 17)
        ],
        classes=[
            ClassCounts(f"engine-{number}", length_class, 100, 1600 // half, 800 // half, 500 // half)
            for number in range(2)
            for half, length_class in enumerate(("long", "medium"), start=1)
        ],
        problems=[ViewedProblem(problem_id, f"What is 2+2?{text}", viewed, 5)],
    )
