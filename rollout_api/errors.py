"""Errors of the client. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

_MAX_LISTED = 5


class RolloutClientError(RuntimeError):
    """Base class of the client's errors. Requests and results that Redis has stored remain there."""


class JobNotFoundError(RolloutClientError):
    """No job has this name."""


class JobChangedError(RolloutClientError):
    """Another job has the name now; the requests were sent to a job that no longer exists."""


class JobEndedError(RolloutClientError):
    """The job has ended or is closed, and answers no more requests."""


class JobFullError(RolloutClientError):
    """The job has as many open rollouts, or images, as it may have; nothing was sent. Try again later."""


class VersionMismatchError(RolloutClientError):
    """Job and client use different versions of the protocol."""


class InvalidRequestError(RolloutClientError, ValueError):
    """The job cannot serve a prompt, a setting or another argument; nothing was sent."""


class RequestRefusedError(RolloutClientError):
    """The job refused requests.

    Args:
        refusals: reason for each refused request id.
    """

    def __init__(self, refusals: Mapping[str, str]) -> None:
        self.refusals = dict(refusals)
        """Reason for each refused request id."""
        super().__init__(f"the job refused {count_of(refusals, 'request')}: {list_reasons(refusals)}")


class UnreadableResultError(RolloutClientError):
    """Results could not be read.

    Args:
        unreadable: reason for each result, by the id of its request and its sample.
    """

    def __init__(self, unreadable: Mapping[str, str]) -> None:
        self.unreadable = dict(unreadable)
        """Reason for each result."""
        super().__init__(
            f"{count_of(unreadable, 'result')} could not be read: {list_reasons(unreadable)}. "
            "Do trainer and job run the same version of das-rollout?"
        )


class WeightsError(RolloutClientError):
    """Weights were not published, or no engine could load them.

    Args:
        text: what is wrong.
        failed: reason for each engine that could not load the weights.
    """

    def __init__(self, text: str, failed: Mapping[str, str] | None = None) -> None:
        self.failed = dict(failed or {})
        """Reason for each engine that could not load the weights."""
        super().__init__(f"{text}: {list_reasons(self.failed)}" if self.failed else text)


class PauseError(RolloutClientError):
    """The job was not paused or resumed in time."""


class RedisUnreachableError(RolloutClientError):
    """Redis was unreachable for longer than ``reconnect_timeout``.

    Open the same step again: it receives the finished rollouts and requests the rest.
    """


class RedisRefusedError(RolloutClientError):
    """Redis refuses the client's password or one of its commands."""


def count_of(items: Mapping[str, str], name: str) -> str:
    """Return how many items there are, for a message: ``1 request``, ``2 requests``."""
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"


def list_reasons(reasons: Mapping[str, str]) -> str:
    """Return the first reasons with their names, and how many more there are."""
    listed = [f"{name}: {reason}" for name, reason in list(reasons.items())[:_MAX_LISTED]]
    if len(reasons) > _MAX_LISTED:
        listed.append(f"and {len(reasons) - _MAX_LISTED} more")
    return "; ".join(listed)
