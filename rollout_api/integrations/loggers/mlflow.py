"""Figures of training steps in MLflow."""

from __future__ import annotations

from rollout_api.integrations.loggers.optional_package import import_for
from rollout_api.integrations.loggers.step_logger import StepLogger
from rollout_api.step_figures import StepFigures


class MlflowLogger(StepLogger):
    """Logs metrics to a run of MLflow, at ``mlflow.get_tracking_uri()``.

    Args:
        run_id: id of the run to log to. Default: the active run, or a new one if there is none.

    Raises:
        ModuleNotFoundError: the package mlflow is missing.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = import_for("MlflowLogger", "mlflow", "mlflow")
        active = self._mlflow.active_run()
        self._is_own = run_id is None and active is None
        self._run_id = run_id or (active or self._mlflow.start_run()).info.run_id

    def log(self, figures: StepFigures, step: int) -> None:
        """See :meth:`StepLogger.log`.

        Raises:
            mlflow.exceptions.MlflowException: the tracking server is unreachable or rejects the metrics.
        """
        self._mlflow.log_metrics(figures.metrics(), step=step, run_id=self._run_id)

    def close(self) -> None:
        """End the run if the logger has started it."""
        if self._is_own:
            self._mlflow.end_run()
