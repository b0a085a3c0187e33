"""The reasoning-gym tasks that the tiny policy learns, and the seeds that are reserved for rollouts.

reasoning-gym draws item ``i`` of a dataset with seed ``s`` from the number ``s + i``, so two datasets of one task share
items if their ranges ``[s, s + size)`` overlap. Training uses the numbers from `TRAINING_SEEDS` on; smaller numbers are
free for rollouts. In small problem spaces, different numbers can give the same question. Training therefore also omits
every question that the numbers in `HELD_OUT_SEEDS` give: a dataset with ``seed + size <= HELD_OUT_SEEDS.stop`` contains
no question that the policy was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from scripts.tiny_model.solutions import solve

HELD_OUT_SEEDS = range(1024)
"""reasoning-gym item numbers whose questions never occur in training."""

TRAINING_SEEDS = 1 << 40
"""First reasoning-gym item number used in training."""

_SEEDS_PER_TRAINING_SEED = 1 << 32
_SEEDS_PER_TASK = 1 << 24


@dataclass(frozen=True)
class Task:
    """A reasoning-gym dataset with its settings, and its share of the training problems.

    Attributes:
        name: reasoning-gym's name of the dataset.
        config: keyword arguments of `reasoning_gym.create_dataset`, except ``seed`` and ``size``.
        share: relative number of training problems.
    """

    name: str
    config: dict[str, int]
    share: float


TASKS: tuple[Task, ...] = (
    Task("chain_sum", {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 3}, 2.0),
    Task("chain_sum", {"min_terms": 6, "max_terms": 16, "min_digits": 2, "max_digits": 3}, 0.7),
    Task("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 1.0),
    Task("products", {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}, 0.5),
    Task("count_bits", {"min_n": 1, "max_n": 4095}, 0.8),
    Task("count_bits", {"min_n": 100_000, "max_n": 2**31 - 1}, 0.5),
    Task("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 10, "max_value": 99}, 0.8),
)
"""The tasks in short and long variants, so that response lengths range from about 25 to 600 tokens."""


def training_problems(seed: int) -> Iterator[tuple[int, str, str]]:
    """Yield training problems endlessly.

    Args:
        seed: seed of the training run, in [0, 1024).

    Yields:
        Index into `TASKS`, question, and step-by-step solution.

    Raises:
        ValueError: if the seed is out of range.
    """
    import reasoning_gym

    if not 0 <= seed < 1024:
        raise ValueError(f"training seed {seed} is out of range: choose 0 to 1023")
    first = TRAINING_SEEDS + seed * _SEEDS_PER_TRAINING_SEED
    streams = [
        reasoning_gym.create_dataset(
            task.name, seed=first + index * _SEEDS_PER_TASK, size=_SEEDS_PER_TASK, **task.config
        )
        for index, task in enumerate(TASKS)
    ]
    held_out = held_out_questions()
    positions = [0] * len(TASKS)
    shares = [task.share for task in TASKS]
    rng = Random(seed)
    while True:
        index = rng.choices(range(len(TASKS)), shares)[0]
        entry = streams[index][positions[index]]
        positions[index] += 1
        if entry["question"] not in held_out:
            yield index, entry["question"], solve(entry, rng)


@cache
def held_out_questions() -> frozenset[str]:
    """Return every question that the item numbers in `HELD_OUT_SEEDS` give in any of the tasks."""
    import reasoning_gym

    return frozenset(
        entry["question"]
        for task in TASKS
        for entry in reasoning_gym.create_dataset(
            task.name, seed=HELD_OUT_SEEDS.start, size=len(HELD_OUT_SEEDS), **task.config
        )
    )
