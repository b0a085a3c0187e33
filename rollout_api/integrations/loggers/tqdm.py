"""Figures of training steps beside a progress bar of tqdm."""

from __future__ import annotations

from typing import Any

from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.step_figures import StepFigures


class TqdmLogger(StepLogger):
    """Shows the most important figures of the latest step behind a progress bar, which the training loop advances.

    Args:
        bar: the progress bar, for example ``tqdm(range(steps))``.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def log(self, figures: StepFigures, step: int) -> None:
        """See :meth:`StepLogger.log`."""
        shown = {
            "reward": (figures.reward_mean, ".3f"),
            "length": (figures.length_mean, ".0f"),
            "accepted/step": (figures.accepted_per_step, ".2f"),
            "tail": (figures.tail_share, ".0%"),
        }
        self._bar.set_postfix({name: format(value, form) for name, (value, form) in shown.items() if value is not None})

    def close(self) -> None:
        """Do nothing: the bar belongs to the training loop."""
