"""The interface of training loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from typing_extensions import Self

from rollout_api.step_figures import StepFigures


class StepLogger(ABC):
    """Logs the figures of training steps: ``with TensorBoardLogger("runs/math") as logger``.

    Of several trainer processes, one logs.
    """

    @abstractmethod
    def log(self, figures: StepFigures, step: int) -> None:
        """Log the figures of a training step.

        Args:
            figures: the figures.
            step: number of the training step. It increases from call to call.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered, and close what the logger itself has opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
