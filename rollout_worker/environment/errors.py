"""What can go wrong in an environment."""

from __future__ import annotations

from enum import StrEnum


class EnvironmentErrorType(StrEnum):
    """Why a rollout got no reward."""

    EXCEPTION = "exception"
    """The environment raised an exception."""
    REWARD = "reward"
    """The environment returned something that is not a finite number."""
    TIMEOUT = "timeout"
    """The environment took longer than ``timeoutSeconds``."""
    MEMORY = "memory"
    """The environment exceeded ``memoryLimit``."""
    EXIT = "exit"
    """The environment's process ended."""
    SAMPLING = "sampling"
    """The job did not answer a turn of the rollout."""
    UNAVAILABLE = "unavailable"
    """The environment could not be loaded again after its process had ended."""


class EnvironmentCallError(Exception):
    """A call of an environment has failed."""

    def __init__(self, error_type: EnvironmentErrorType, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        """What has happened."""


class EnvironmentLoadError(Exception):
    """An environment cannot be loaded, or has no usable problems."""
