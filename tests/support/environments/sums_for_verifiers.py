"""Environments of ``verifiers`` about sums, of one turn or several."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset


class SumsEnvironment(vf.MultiTurnEnv):
    """Asks for one sum after the other. It fails for one problem, and its process dies once."""

    def __init__(self, marker: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._marker = Path(marker)

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        """Return the next question."""
        if state["answer"] == "unanswerable":
            raise LookupError("this sum has no successor")
        if len(state["trajectory"]) == 2 and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [vf.UserMessage(content=f"{len(state['trajectory'])}+4=")]


def length_reward(completion: vf.Messages, **_: Any) -> float:
    """Return how many responses there are."""
    return float(sum(message.role == "assistant" for message in completion))


def rank_rewards(states: list[vf.State], **_: Any) -> list[float]:
    """Return different rewards for the rollouts of a group."""
    return [0.125 * number for number in range(len(states))]


def load_environment(turns: int = 1, marker: str = "", groups: bool = False) -> vf.Environment:
    """Return an environment with rollouts of some turns."""
    answers = ["5", "6", "unanswerable"]
    rows = [
        {"prompt": [{"role": "user", "content": f"{number}+4="}], "answer": answer}
        for number, answer in enumerate(answers, start=1)
    ]
    rubric = vf.Rubric(funcs=[length_reward, rank_rewards] if groups else [length_reward])
    if turns == 1:
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
    return SumsEnvironment(marker, dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns)
