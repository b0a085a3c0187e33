"""Training problems, and the seeds that are held out."""

from __future__ import annotations

from itertools import islice

import pytest
import reasoning_gym

from scripts.tiny_model.tasks import HELD_OUT_SEEDS, TASKS, training_problems


def test_training_contains_no_held_out_question() -> None:
    trained_on = {question for _, question, _ in islice(training_problems(0), 3000)}
    held_out = {
        entry["question"]
        for task in TASKS
        for entry in reasoning_gym.create_dataset(
            task.name, seed=HELD_OUT_SEEDS.start, size=len(HELD_OUT_SEEDS), **task.config
        )
    }
    assert set() == trained_on & held_out


def test_training_problems_depend_on_the_seed() -> None:
    first = list(islice(training_problems(3), 50))
    assert first == list(islice(training_problems(3), 50))
    assert first != list(islice(training_problems(4), 50))


def test_every_task_occurs_in_training() -> None:
    assert set(range(len(TASKS))) == {index for index, _, _ in islice(training_problems(0), 400)}


@pytest.mark.parametrize("seed", [-1, 1024])
def test_a_training_seed_out_of_range_is_rejected(seed: int) -> None:
    with pytest.raises(ValueError, match="0 to 1023"):
        next(training_problems(seed))
