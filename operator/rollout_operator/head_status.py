"""What a job's head says of it at ``/status``: the part that the operator uses."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class EngineStatus(BaseModel):
    """One engine."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    worker: str = ""
    """Name of the worker's pod."""
    slots: int = 0
    assigned: int = 0
    """Rollouts that it has."""
    idle_seconds: float = 0.0
    """Since it had one last."""


class HeadStatus(BaseModel):
    """The job. What a newer head says besides is ignored; what an older one does not say has a default."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_version: int = 0
    waiting: int = 0
    """Rollouts that no engine has yet."""
    assigned: int = 0
    done: int = 0
    total: int | None = None
    """Rollouts of a dataset source in all its epochs."""
    epoch: int | None = None
    tokens: int = 0
    accepted_per_step: float = 0.0
    steps: int = 0
    canaries: int = 0
    """Rollouts without drafts that were compared with their siblings."""
    distribution_drift: bool = False
    """Whether drafts change what is sampled."""
    unverified: tuple[str, ...] = ()
    """Engines whose drafts do not reach the model as they are made."""
    saved: float | None = None
    """Share of decoding time that drafts saved; negative if they cost time."""
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    work_seconds: float | None = None
    """Until all that is open is answered, if all engines were busy to the end."""
    tail_seconds: float | None = None
    """Until the rollout that has most ahead ends: more workers do not shorten it."""
    redis_away: str | None = None
    """What is the matter with Redis, where the job waits for it."""
    engine_errors: dict[str, str] = Field(default_factory=dict)
    """Engines that do not start, and why."""
    engines: tuple[EngineStatus, ...] = Field(default=())

    @classmethod
    def of_message(cls, message: str) -> Self | None:
        """What a head said last, as the message of its container's end; None if it said nothing."""
        try:
            said = cls.model_validate_json(message)
        except ValidationError:
            return None
        return said if "done" in said.model_fields_set else None
