"""A tiny Qwen3 policy for demos and tests, trained from scratch in minutes, without a download.

:func:`ensure` returns the checkpoints of one training run on step-by-step solutions of reasoning-gym problems. They
simulate the successive policies of an RL run: they answer in the right format, and change from one to the next.
:func:`default_tasks` returns the tasks that the policy was trained for.

Importing this package does not import torch and transformers; training a policy does.
"""

from rollout_tools.tiny_model.cache import ensure
from rollout_tools.tiny_model.tasks import HELD_OUT_SEEDS, default_tasks
from rollout_tools.tiny_model.train import Recipe, TrainingProgress

__all__ = ["HELD_OUT_SEEDS", "Recipe", "TrainingProgress", "default_tasks", "ensure"]
