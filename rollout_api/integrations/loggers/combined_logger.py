"""Several training loggers as one."""

from __future__ import annotations

from contextlib import ExitStack

from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.step_figures import StepFigures


class CombinedLogger(StepLogger):
    """Logs to several loggers, and closes them.

    Args:
        loggers: the loggers.
    """

    def __init__(self, *loggers: StepLogger) -> None:
        self._loggers = loggers

    def log(self, figures: StepFigures, step: int) -> None:
        """See :meth:`StepLogger.log`."""
        for logger in self._loggers:
            logger.log(figures, step)

    def close(self) -> None:
        """Close all loggers, even if one raises an error."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close)
