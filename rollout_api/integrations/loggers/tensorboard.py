"""Figures of training steps in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_api.integrations.loggers.optional_package import import_for
from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.step_figures import StepFigures


class TensorBoardLogger(StepLogger):
    """Logs scalars to TensorBoard.

    Args:
        target: directory for event files, or the trainer's own ``SummaryWriter`` of torch or tensorboardX.

    Raises:
        ModuleNotFoundError: *target* is a directory, and the package tensorboard or torch is missing.
    """

    def __init__(self, target: str | Path | Any) -> None:
        self._writer: Any = target
        self._is_own = isinstance(target, str | Path)
        if self._is_own:
            tensorboard = import_for("TensorBoardLogger", "torch.utils.tensorboard", "tensorboard torch")
            self._writer = tensorboard.SummaryWriter(str(target))

    def log(self, figures: StepFigures, step: int) -> None:
        """See :meth:`StepLogger.log`."""
        for name, value in figures.metrics().items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered, and close the writer if the logger has opened it."""
        if self._is_own:
            self._writer.close()
        else:
            self._writer.flush()
