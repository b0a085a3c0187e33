"""A job's side of the protocol with one engine that loads every published version of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_api import Rewards, RolloutRequest, WeightUpdate, decode, encode
from rollout_api.protocol.messages import InitWeightTransfer
from tests.support.fake_job import FakeJob


class UpdatingJob(FakeJob):
    """A fake job with an engine. It records the requests and updates that it receives.

    Args:
        url: URL of Redis.
        version: weight version that the engine serves.
        transfer_backend: backend with which the engine receives weights from memory; '' if it receives none.
        **options: arguments of :class:`FakeJob`.
    """

    def __init__(self, url: str, version: int = 0, transfer_backend: str = "", **options: Any) -> None:
        super().__init__(url, **options)
        self._report: dict[str, Any] = {"transfer_backend": transfer_backend}
        self.updates: list[WeightUpdate] = []
        """Updates in the order of their publication."""
        self.version = version
        """Weight version that the engine serves."""
        self.received: list[RolloutRequest] = []
        """Requests in the order of their arrival."""
        self.report()

    def publish_status(self, **status: object) -> None:
        """Publish a status that contains the weight version."""
        super().publish_status(weight_version=self.version, **status)

    def serve_once(self, answer: Callable[[RolloutRequest], None] | None = None) -> None:
        """Load published weights, then answer all requests."""
        for entry, fields in self.redis.xrange(self.keys.control):
            message = decode(fields[b"d"])
            if isinstance(message, InitWeightTransfer):
                self.redis.hset(self.keys.weights, "group", encode(message))
                self.join(message)
                self.redis.xdel(self.keys.control, entry)
            if isinstance(message, WeightUpdate):
                self.updates.append(message)
                self.adopt_update(message, entry)
                if (reason := self.load(message)) is not None:
                    self.finish(message, reason)
        self.continue_loading()
        for request in self.requests():
            self.received.append(request)
            (answer or self.answer)(request)

    def load(self, update: WeightUpdate) -> str | None:
        """Load published weights; return why they cannot be loaded, '' if they were, or None if that takes longer."""
        return ""

    def continue_loading(self) -> None:
        """Continue to load weights."""

    def join(self, message: InitWeightTransfer) -> None:
        """Join a trainer's group."""

    def finish(self, update: WeightUpdate, reason: str) -> None:
        """Report that weights were loaded, or why they were not."""
        if not reason:
            self.version = update.weight_version
        self.report(failed={update.weight_version: reason} if reason else {}, receiving="")

    def report(self, **fields: Any) -> None:
        """Report the engine's state, which has changed in these fields."""
        self._report |= fields
        self.report_engine("engine-0", version=self.version, **self._report)

    def rewards(self) -> dict[str, float]:
        """Return the reported rewards by rollout id."""
        found: dict[str, float] = {}
        for _, fields in self.redis.xrange(self.keys.rewards):
            message = decode(fields[b"d"])
            assert isinstance(message, Rewards)
            found |= message.rewards
        return found
