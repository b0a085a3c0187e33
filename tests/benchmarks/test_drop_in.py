"""What the benchmark of trainings by TRL counts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.drop_in import EPOCHS, FAULTS, Generation, Training, figures_of, read_generations


def training(arm: str, seed: int, seconds: list[float]) -> Training:
    """Return a training with one generation in each epoch."""
    reward = 0.5 + 0.01 * seed if arm == "memory" else 0.5
    return Training(
        arm, seed, [Generation(epoch, epoch - 1, one, 40, 1000, reward) for epoch, one in enumerate(seconds, start=1)]
    )


def test_a_step_that_is_repeated_after_a_restart_counts_once(tmp_path: Path) -> None:
    steps = [Generation(1, 0, 1.0, 40, 100), Generation(1, 1, 9.0, 40, 100), Generation(1, 1, 2.0, 40, 100)]
    (tmp_path / "generations.jsonl").write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))
    assert read_generations(tmp_path) == [steps[0], steps[2]]


def test_times_are_compared_with_the_training_without_drafts_of_the_same_seed() -> None:
    trainings = {
        (one.arm, one.seed): one
        for seed in range(3)
        for one in (
            training("plain", seed, [4.0 * (1 + seed)] * EPOCHS),
            training("memory", seed, [4.0 * (1 + seed), *[2.0 * (1 + seed)] * (EPOCHS - 1)]),
            training("redis", seed, [4.0 * (1 + seed), 2.0 * (1 + seed), 1.6 * (1 + seed), 2.0 * (1 + seed)]),
        )
    } | {(f"Redis {fault}", 0): training(f"Redis {fault}", 0, [4.0, 2.0, 5.0, 5.0]) for fault in FAULTS}
    values = {figure.name: figure.value for figure in figures_of(trainings)}
    assert [values[f"generation, plain / with drafts, epoch {epoch}"] for epoch in range(1, EPOCHS + 1)] == [1, 2, 2, 2]
    assert values["generation, plain / with drafts from Redis, epoch 3, after a restart"] == pytest.approx(2.5)
    assert values["tokens per second, first epoch after the restart / last before"] == pytest.approx(1.25)
    assert values["mean reward, memory - plain"] == pytest.approx(0.01)
    assert values["p-value of equal rewards, memory"] == pytest.approx(0.2254, abs=1e-3)
    assert values["generation, plain / with drafts, epochs 3 and 4, Redis killed during the first"] == 0.8
    assert values["equal numbers of rollouts in each step, Redis full"] == 1
