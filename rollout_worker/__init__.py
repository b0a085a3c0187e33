"""The rollout worker: vLLM with a drafter that learns from earlier rollouts of the same problem."""
