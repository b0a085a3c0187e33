"""How the tiny policy of rollout_worker.tiny_model was trained."""
