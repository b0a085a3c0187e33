"""Which weight versions may sample a rollout. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollout_api.protocol.messages import RolloutRequest


@dataclass(frozen=True)
class VersionBounds:
    """The weight versions with which a request allows its rollouts to be dispatched to an engine."""

    pinned: int | None = None
    """The only version that may sample the rollouts; None for any."""
    minimum: int = 0
    """Oldest version."""
    max_staleness: int | None = None
    """Largest number of versions behind the newest published one; None for any."""

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        """Return the bounds of a request."""
        return cls(request.weight_version, request.min_weight_version or 0, request.max_staleness)

    def oldest(self, newest: int) -> int:
        """Return the oldest version that is allowed while *newest* is the newest published one."""
        if self.pinned is not None:
            return self.pinned
        return max(self.minimum, 0 if self.max_staleness is None else newest - self.max_staleness)

    def allow(self, version: int, newest: int) -> bool:
        """Return whether an engine with *version* may sample, while *newest* is the newest published version."""
        return version == self.pinned if self.pinned is not None else version >= self.oldest(newest)


ANY_VERSION = VersionBounds()
"""The bounds of requests that any version may sample."""
