"""A job's side of the protocol, with one engine that takes over whatever weights are published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_api import Rewards, RolloutRequest, WeightUpdate, decode
from tests.support.job_side import JobSide


class UpdatingJob(JobSide):
    """See above; remembers what it was asked."""

    def __init__(self, url: str, version: int = 0, **about: Any) -> None:
        super().__init__(url, **about)
        self.updates: list[WeightUpdate] = []
        self.version = version
        self.seen: list[RolloutRequest] = []
        self.engine("engine-0", version=version)

    def say(self, **status: object) -> None:
        super().say(weight_version=self.version, **status)

    def serve_once(self, answer: Callable[[RolloutRequest], None] | None = None) -> None:
        for entry, fields in self.redis.xrange(self.keys.control):
            if isinstance(message := decode(fields[b"d"]), WeightUpdate):
                self.updates.append(message)
                self.version = message.weight_version
                self.engine("engine-0", version=self.version)
                self.take_up(message, entry)
        for request in self.requests():
            self.seen.append(request)
            (answer or self.answer)(request)

    def rewards(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for _, fields in self.redis.xrange(self.keys.rewards):
            message = decode(fields[b"d"])
            assert isinstance(message, Rewards)
            found |= message.rewards
        return found
