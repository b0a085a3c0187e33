"""What can go wrong between a trainer and its job. Each text says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

_LISTED = 5


class RolloutClientError(RuntimeError):
    """Any failure of a client; what Redis has taken is kept."""


class JobNotFoundError(RolloutClientError):
    """No job runs under this name."""


class JobChangedError(RolloutClientError):
    """Another job runs under the name now: the requests went to one that is gone."""


class JobEndedError(RolloutClientError):
    """The job has ended, or is closed, and answers nothing more."""


class VersionMismatchError(RolloutClientError):
    """Job and client speak different versions of the protocol."""


class NameInUseError(RolloutClientError):
    """Another process is connected under this client's name and would take its results."""


class InvalidRequestError(RolloutClientError, ValueError):
    """A prompt, a setting or another argument that the job could not serve; nothing was sent."""


class RequestRefusedError(RolloutClientError):
    """The job refused requests."""

    def __init__(self, refusals: Mapping[str, str]) -> None:
        """Take *refusals*: request id → reason."""
        self.refusals = dict(refusals)
        super().__init__(f"the job refused {_count(refusals, 'request')}: {_listed(refusals)}")


class UnreadableResultError(RolloutClientError):
    """Results that cannot be read; they lie in the job's stream of dead letters."""

    def __init__(self, unreadable: Mapping[str, str]) -> None:
        """Take *unreadable*: rollout id (or stream entry, where there is none) → reason."""
        self.unreadable = dict(unreadable)
        super().__init__(
            f"{_count(unreadable, 'result')} could not be read and moved to the dead letters: {_listed(unreadable)}; "
            "do trainer and job run the same version of das-rollout?"
        )


class WeightsError(RolloutClientError):
    """Weights that were not published, or that no engine could load."""

    def __init__(self, text: str, failed: Mapping[str, str] | None = None) -> None:
        """Take what is wrong, and engine → why it could not load them."""
        self.failed = dict(failed or {})
        super().__init__(f"{text}: {_listed(self.failed)}" if self.failed else text)


class RedisAwayError(RolloutClientError):
    """Redis did not answer for longer than the client's patience."""


class RedisRefusedError(RolloutClientError):
    """Redis refuses this client: its password, its rights, or a command."""


def _count(things: Mapping[str, str], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _listed(reasons: Mapping[str, str]) -> str:
    listed = [f"{name}: {reason}" for name, reason in list(reasons.items())[:_LISTED]]
    if len(reasons) > _LISTED:
        listed.append(f"and {len(reasons) - _LISTED} more")
    return "; ".join(listed)
