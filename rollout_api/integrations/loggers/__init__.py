"""Training loggers: they put the figures of each training step beside the reward.

Importing this package loads none of the packages that the loggers write to; a logger imports its own when it is
created.
"""

from rollout_api.integrations.loggers.combined_logger import CombinedLogger
from rollout_api.integrations.loggers.mlflow import MlflowLogger
from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.integrations.loggers.tensorboard import TensorBoardLogger
from rollout_api.integrations.loggers.tqdm import TqdmLogger
from rollout_api.integrations.loggers.wandb import WandbLogger

__all__ = ["CombinedLogger", "MlflowLogger", "StepLogger", "TensorBoardLogger", "TqdmLogger", "WandbLogger"]
