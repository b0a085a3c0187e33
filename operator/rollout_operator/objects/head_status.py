"""The fields of a head's ``/status`` that the operator uses."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_api.manifest.status import ProgressStatus

STATUS_PERIOD_S = 10.0
"""Seconds between two reads of the status of a running job's head."""
STARTING_PERIOD_S = 2.0
"""The same for a head that reports no engine yet, although a worker is ready."""


class EngineStatus(BaseModel):
    """The status of one engine."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    worker: str = ""
    """Name of the worker pod."""
    max_running: int = 0
    """Maximum number of rollouts that the engine runs at once."""
    assigned: int = 0
    """Number of rollouts assigned to the engine."""
    idle_seconds: float = 0.0
    """Time since the engine last had a rollout."""


class EnvironmentErrorStatus(BaseModel):
    """Rollouts that got no reward from the environment of a dataset source, for one type of reason."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    count: int = 0
    problem: str = ""
    """Problem of the first of them."""
    message: str = ""
    """What has happened there."""


class HeadStatus(BaseModel):
    """The status of a job as its head reports it: fields of :class:`rollout_api.protocol.status.ServedStatus`.

    A running job keeps its image when the operator is upgraded, so unknown fields are ignored, and all have defaults.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_version: int = 0
    waiting: int = 0
    """Number of rollouts that are not assigned to an engine yet."""
    assigned: int = 0
    """Number of rollouts that are assigned to engines."""
    done: int = 0
    """Number of finished rollouts."""
    total: int | None = None
    """Number of rollouts of a dataset source in all its epochs."""
    epoch: int | None = None
    tokens: int = 0
    """Response tokens of finished rollouts."""
    accepted_per_step: float = 0.0
    """Accepted tokens per decoding step."""
    decoding_steps: int = 0
    """Decoding steps of finished rollouts."""
    canaries: int = 0
    """Number of canaries that were compared with their siblings."""
    distribution_drift: bool = False
    """Whether the canaries show that drafting changes the output distribution."""
    unverified: tuple[str, ...] = ()
    """Engines on which vLLM does not verify the drafts that are proposed."""
    saved: float | None = None
    """Fraction of the decoding time that drafting saved; negative if drafting cost time."""
    tokens_per_second: float = 0.0
    remaining_seconds: float | None = None
    """Estimated time until all open requests are answered."""
    work_seconds: float | None = None
    """Estimated time until all open requests are answered if all engines stay busy until then."""
    tail_seconds: float | None = None
    """Estimated duration of the longest remaining rollout, which more workers do not shorten."""
    redis_error: str | None = None
    """Why Redis is unavailable, while the job waits for it."""
    engine_errors: dict[str, str] = Field(default_factory=dict)
    """Engines that cannot start, and the reason of each."""
    environment_errors: dict[str, EnvironmentErrorStatus] = Field(default_factory=dict)
    """Rollouts that got no reward from the environment of a dataset source, by type of error."""
    engines: tuple[EngineStatus, ...] = Field(default=())

    @property
    def progress(self) -> ProgressStatus:
        """The progress for the status of the job."""
        return ProgressStatus(
            done=self.done,
            total=self.total,
            open=self.waiting + self.assigned,
            epoch=self.epoch,
            weight_version=self.weight_version,
            tokens=self.tokens,
            tokens_per_second=round(self.tokens_per_second),
            accepted_per_step=f"{self.accepted_per_step:.2f}" if self.decoding_steps else None,
            seconds_left=None if self.remaining_seconds is None else round(self.remaining_seconds),
            summary=str(self.done) if self.total is None else f"{self.done}/{self.total}",
        )

    @property
    def time_saved(self) -> str | None:
        """The share of decoding time that drafting has saved, for the status of the job."""
        return None if self.saved is None else f"{round(100 * self.saved)}%"

    @classmethod
    def from_termination_message(cls, message: str) -> Self | None:
        """Parse the last status of a head that succeeded, which is its container's termination message.

        Returns None if the message is not a status.
        """
        try:
            status = cls.model_validate_json(message)
        except ValidationError:
            return None
        return status if "done" in status.model_fields_set else None
