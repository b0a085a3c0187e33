"""How the tiny policy of rollout_tools.tiny_model was trained."""
