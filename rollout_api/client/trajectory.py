"""A multi-turn trajectory: the model and an environment take turns."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_api.client.prompts import token_list
from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import Purpose, Rollout, problem_id_of


class Trajectory:
    """A conversation between the model and an environment, begun with ``step.trajectory(prompt)``::

        trajectory = step.trajectory(prompt)
        while not done:
            [rollout] = await step.turn([trajectory])
            observation, done = environment(rollout.token_ids)
            trajectory.observe(observation)

    Args:
        trajectory_id: id that is unique within the job.
        prompt: token ids of the prompt.
        problem_id: problem id; default: a hash of *prompt*.
        purpose: purpose of all rollouts of the trajectory.

    Raises:
        InvalidRequestError: *prompt* is empty or not a sequence of integers.
    """

    def __init__(
        self, trajectory_id: str, prompt: Sequence[int], *, problem_id: str = "", purpose: Purpose = Purpose.TRAIN
    ) -> None:
        self.trajectory_id = trajectory_id
        """Id of the trajectory."""
        self.prompt_token_ids = token_list(prompt, f"trajectory {trajectory_id}")
        """Token ids of the prompt."""
        if not self.prompt_token_ids:
            raise InvalidRequestError(f"trajectory {trajectory_id}: no token ids")
        self.problem_id = problem_id or problem_id_of(self.prompt_token_ids)
        """Problem id of all turns."""
        self.purpose = purpose
        """Purpose of all turns."""
        self.response_token_ids: list[int] = []
        """Token ids after the prompt, both the model's and the environment's."""
        self.mask: list[int] = []
        """For each response token, 1 if the model sampled it and 0 if it came from the environment."""
        self._logprobs: list[float] | None = []
        self.turns: list[Rollout] = []
        """The model's turns."""

    @property
    def context(self) -> list[int]:
        """Token ids of the prompt and the response so far, which are the prompt of the next turn."""
        return self.prompt_token_ids + self.response_token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """Behavior log-probability of each response token, 0 for the environment's tokens; None if a turn was sampled
        without ``sampling.logprobs``.
        """
        return self._logprobs

    @property
    def rollout_ids(self) -> list[str]:
        """Rollout ids of the turns, for ``report_rewards``."""
        return [turn.rollout_id for turn in self.turns]

    def append(self, rollout: Rollout) -> None:
        """Append a turn of the model. ``step.turn`` does this."""
        self.turns.append(rollout)
        self._extend(rollout.token_ids, rollout.logprobs if rollout.token_ids else [], 1)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens from the environment.

        Raises:
            InvalidRequestError: *token_ids* is not a sequence of integers.
        """
        tokens = token_list(token_ids, f"trajectory {self.trajectory_id}, after turn {len(self.turns) - 1}")
        self._extend(tokens, [0.0] * len(tokens), 0)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None, mask: int) -> None:
        self.response_token_ids += tokens
        if logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs += logprobs
        self.mask += [mask] * len(tokens)
