"""A job's side of the protocol with one engine that loads every published version of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_api import Rewards, RolloutRequest, WeightUpdate, decode
from tests.support.fake_job import FakeJob


class UpdatingJob(FakeJob):
    """A fake job with an engine. It records the requests and updates that it receives.

    Args:
        url: URL of Redis.
        version: weight version that the engine serves.
        broadcast: backend with which the engine receives broadcast weights; an empty string if it receives none.
        **options: arguments of :class:`FakeJob`.
    """

    def __init__(self, url: str, version: int = 0, broadcast: str = "", **options: Any) -> None:
        super().__init__(url, **options)
        self.broadcast = broadcast
        self.updates: list[WeightUpdate] = []
        """Updates in the order in which they were published."""
        self.version = version
        """Weight version that the engine serves."""
        self.received: list[RolloutRequest] = []
        """Requests in the order in which they were received."""
        self.report_engine("engine-0", version=version, broadcast=broadcast)

    def publish_status(self, **status: object) -> None:
        """Publish a status that contains the weight version."""
        super().publish_status(weight_version=self.version, **status)

    def serve_once(self, answer: Callable[[RolloutRequest], None] | None = None) -> None:
        """Load published weights, then answer all requests."""
        for entry, fields in self.redis.xrange(self.keys.control):
            if isinstance(message := decode(fields[b"d"]), WeightUpdate):
                self.updates.append(message)
                failed = {}
                if reason := self.load(message):
                    failed[message.weight_version] = reason
                else:
                    self.version = message.weight_version
                self.report_engine("engine-0", version=self.version, failed=failed, broadcast=self.broadcast)
                self.adopt_update(message, entry)
        for request in self.requests():
            self.received.append(request)
            (answer or self.answer)(request)

    def load(self, update: WeightUpdate) -> str:
        """Load published weights; return why they cannot be loaded, or an empty string."""
        return ""

    def rewards(self) -> dict[str, float]:
        """Return the reported rewards by rollout id."""
        found: dict[str, float] = {}
        for _, fields in self.redis.xrange(self.keys.rewards):
            message = decode(fields[b"d"])
            assert isinstance(message, Rewards)
            found |= message.rewards
        return found
