"""The rollout worker: vLLM with a drafter that learns from earlier rollouts of the same problem."""

from rollout_worker.drop_in.settings import drafting_args

__all__ = ["drafting_args"]
