"""Errors of a launched job that its user can repair."""


class StateError(RuntimeError):
    """The state directory cannot be used. The text says why, and what to do."""


class DeadlineError(RuntimeError):
    """The job has exceeded ``lifecycle.activeDeadlineSeconds``."""
