"""The written solutions are correct, as scored by reasoning-gym."""

from __future__ import annotations

import math
import re
from random import Random

import pytest
import reasoning_gym
from reasoning_gym.utils import extract_answer

from scripts.tiny_model.solutions import (
    UnsupportedProblemError,
    solve,
)
from scripts.tiny_model.tasks import TASKS, Task


def _label(task: Task) -> str:
    return "-".join([task.name, *(str(value) for value in task.config.values())])


def _value(expression: str) -> int:
    """Return the value of numbers joined by ``+``, ``-`` and ``*``."""
    terms = re.findall(r"([+-]?)(\d+(?:\*\d+)*)", expression)
    return sum(
        (-1 if sign == "-" else 1) * math.prod(int(factor) for factor in product.split("*")) for sign, product in terms
    )


@pytest.mark.parametrize("task", TASKS, ids=_label)
def test_every_solution_earns_full_reward(task: Task) -> None:
    dataset = reasoning_gym.create_dataset(task.name, seed=7, size=400, **task.config)
    wrong = [
        entry["question"]
        for index, entry in enumerate(dataset)
        if dataset.score_answer(extract_answer(solve(entry, Random(index))), entry) != 1.0
    ]
    assert [] == wrong


@pytest.mark.parametrize("task", TASKS, ids=_label)
def test_every_equation_in_the_working_holds(task: Task) -> None:
    dataset = reasoning_gym.create_dataset(task.name, seed=11, size=100, **task.config)
    checked = 0
    for entry in dataset:
        for left, right in re.findall(r"(\d+(?:[-+*]\d+)+)=(\d+)", solve(entry, Random(3))):
            assert int(right) == _value(left), left
            checked += 1
    assert checked > 0 or task.name in {"count_bits", "gcd"}


def test_a_solution_depends_only_on_the_problem_and_the_random_state() -> None:
    entry = reasoning_gym.create_dataset("products", seed=1, size=1)[0]
    assert solve(entry, Random(5)) == solve(entry, Random(5))
    assert len({solve(entry, Random(seed)) for seed in range(40)}) > 4


def test_an_error_about_an_unknown_dataset_lists_the_known_ones() -> None:
    entry = reasoning_gym.create_dataset("maze", seed=1, size=1)[0]
    with pytest.raises(UnsupportedProblemError, match=r"'maze'.*chain_sum"):
        solve(entry, Random(0))


@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_negative_operands_are_rejected(name: str) -> None:
    dataset = reasoning_gym.create_dataset(name, seed=2, size=50, allow_negation=True)
    entry = next(entry for entry in dataset if re.search(r"(^|[-+*] )-\d", entry["metadata"]["expression"]))
    with pytest.raises(UnsupportedProblemError, match="allow_negation"):
        solve(entry, Random(0))
