"""A multi-turn trajectory: the model and an environment speak in turn."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_api.client.prompts import token_list
from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import Purpose, Rollout, problem_id_of


class Trajectory:
    """The context so far, and who said what in it. Made by ``step.trajectory(prompt)``::

    one = step.trajectory(prompt)
    while not done:
        [said] = await step.turn([one])
        answer, done = environment(said.token_ids)
        one.observe(answer)
    """

    def __init__(
        self, trajectory_id: str, prompt: Sequence[int], *, problem_id: str = "", purpose: Purpose = Purpose.TRAIN
    ) -> None:
        """Begin with a prompt.

        Args:
            trajectory_id: unique within the job.
            prompt: token ids.
            problem_id: default: a hash of *prompt*.
            purpose: of all its rollouts.

        Raises:
            InvalidRequestError: if *prompt* is empty or no sequence of integers.
        """
        self.trajectory_id = trajectory_id
        self.prompt_token_ids = token_list(prompt, f"trajectory {trajectory_id}")
        if not self.prompt_token_ids:
            raise InvalidRequestError(f"trajectory {trajectory_id}: no token ids")
        self.problem_id = problem_id or problem_id_of(self.prompt_token_ids)
        self.purpose = purpose
        self.response_token_ids: list[int] = []
        """All that came after the prompt, the model's tokens and the environment's."""
        self.mask: list[int] = []
        """For each response token: 1 if it is the model's, 0 if it is the environment's."""
        self.logprobs: list[float] = []
        """For each response token: its log-probability where sampling.logprobs asked for it; 0 otherwise."""
        self.turns: list[Rollout] = []
        """What the model said."""

    @property
    def context(self) -> list[int]:
        """Prompt and response so far: the prompt of the next turn."""
        return self.prompt_token_ids + self.response_token_ids

    @property
    def reward_ids(self) -> list[str]:
        """The rollout ids of its turns, for ``report_rewards``."""
        return [turn.rollout_id for turn in self.turns]

    def append(self, rollout: Rollout) -> None:
        """Take what the model said; ``step.turn`` does so."""
        self.turns.append(rollout)
        self._extend(rollout.token_ids, rollout.logprobs or [0.0] * len(rollout.token_ids), 1)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append what the environment said.

        Raises:
            InvalidRequestError: if *token_ids* is no sequence of integers.
        """
        tokens = token_list(token_ids, f"trajectory {self.trajectory_id}, after turn {len(self.turns) - 1}")
        self._extend(tokens, [0.0] * len(tokens), 0)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], whose: int) -> None:
        self.response_token_ids += tokens
        self.logprobs += logprobs
        self.mask += [whose] * len(tokens)
