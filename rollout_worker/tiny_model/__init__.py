"""A tiny Qwen3 policy for demos and tests, trained from scratch in minutes, with no download.

`ensure` gives the checkpoints of one training run on step-by-step solutions of reasoning-gym problems.
Successive checkpoints stand in for the successive policies of an RL run: they already answer in the right
format, and still drift. `default_tasks` names the problems that the policy was trained for.

Importing this package is light; torch and transformers load when a policy is trained.
"""

from rollout_worker.tiny_model.cache import ensure
from rollout_worker.tiny_model.tasks import HELD_OUT_SEEDS, default_tasks
from rollout_worker.tiny_model.train import Recipe, TrainingProgress

__all__ = ["HELD_OUT_SEEDS", "Recipe", "TrainingProgress", "default_tasks", "ensure"]
