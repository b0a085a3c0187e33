"""Figures of training steps in Weights & Biases."""

from __future__ import annotations

from typing import Any

from rollout_api.integrations.loggers.optional_package import import_for
from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.step_figures import PREFIX, StepFigures, metric_names

_STEP = f"{PREFIX}step"
"""The metric over which the figures are plotted.

It is not the step of W&B itself, which counts calls of ``log`` in trainers such as those of transformers, and which
may not decrease.
"""


class WandbLogger(StepLogger):
    """Logs to a run of Weights & Biases, in which the figures are plotted over the metric ``rollout/step``.

    Args:
        run: run to log to. Default: the active run, or a new one if there is none, as ``wandb.init()`` starts it.

    Raises:
        ModuleNotFoundError: the package wandb is missing.
    """

    def __init__(self, run: Any = None) -> None:
        wandb = import_for("WandbLogger", "wandb", "wandb")
        self._is_own = run is None and wandb.run is None
        self._run = run or wandb.run or wandb.init()
        self._run.define_metric(_STEP, hidden=True)
        # By their full names: they take precedence over the pattern "*" of transformers.WandbCallback.
        for name in metric_names():
            self._run.define_metric(name, step_metric=_STEP)

    def log(self, figures: StepFigures, step: int) -> None:
        """See :meth:`StepLogger.log`."""
        self._run.log({_STEP: step, **figures.metrics()})

    def close(self) -> None:
        """Finish the run if the logger has started it."""
        if self._is_own:
            self._run.finish()
