"""An environment for `environment.yaml`: sums, and a reward for the right one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from rollout_api.environment import ChatMessage, Problem

QUESTION = (
    "State the final answer to the following arithmetic problem: {first} + {second} =\n"
    "Write the answer between <answer> and </answer>."
)


class SumsEnvironment:
    """Sums of two numbers."""

    def __init__(self, seed: int, digits: int) -> None:
        self._seed, self._limit = seed, 10**digits

    def problems(self) -> Iterator[Problem]:
        """Return an endless number of problems, the same ones for a seed."""
        choice = random.Random(self._seed)
        number = 0
        while True:
            first, second = choice.randrange(self._limit), choice.randrange(self._limit)
            prompt = QUESTION.format(first=first, second=second)
            yield Problem(f"sum-{number}", prompt, answer=first + second)
            number += 1

    def reward(self, problem: Problem, messages: list[ChatMessage]) -> float:
        """Return 1 for the right sum."""
        answers = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", messages[-1]["content"])
        return float(bool(answers) and int(answers[-1]) == problem.answer)


def make(seed: int = 0, digits: int = 2) -> SumsEnvironment:
    """Return the environment; the parameters are ``args`` of the manifest."""
    return SumsEnvironment(seed, digits)
