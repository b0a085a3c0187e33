"""The training of the tiny policy of rollout_tools.tiny_model."""
