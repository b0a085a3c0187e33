"""The rollouts that are assigned to one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_api.protocol.messages import FinishReason, RolloutRequest
from rollout_store.job import Assignment, Order
from rollout_store.job.assignments import RolloutKey


@dataclass(eq=False)
class RunningRollout:
    """One rollout that this engine has to produce."""

    order: Order
    assignment: Assignment
    started_at: float = field(default_factory=time.time)
    """Unix time at which the engine received the assignment."""
    request: RolloutRequest | None = None
    """The request; None until the engine has read it."""
    task: asyncio.Task[None] | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the rollout with the tokens that it has."""
    finish_reason: FinishReason | None = None
    """Finish reason of a stopped rollout; None if it continues on another engine, so that the client gets no answer."""
    pinned_version: int | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity within the job."""
        return self.assignment.key

    def stop(self, reason: FinishReason | None) -> None:
        """End the rollout with the tokens that it has."""
        if not self.stopped.is_set():
            self.finish_reason = reason
            self.stopped.set()


class RunningRollouts:
    """The rollouts that this engine is producing, by request id and sample."""

    def __init__(self) -> None:
        self._by_key: dict[RolloutKey, RunningRollout] = {}

    def __iter__(self) -> Iterator[RunningRollout]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: RolloutKey) -> bool:
        return key in self._by_key

    @property
    def keys(self) -> frozenset[RolloutKey]:
        """Request id and sample of each rollout."""
        return frozenset(self._by_key)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that produce the rollouts."""
        return [running.task for running in self._by_key.values() if running.task is not None]

    @property
    def num_pinned(self) -> int:
        """Number of rollouts that are pinned to a weight version."""
        return sum(running.pinned_version is not None for running in self._by_key.values())

    def add(self, running: RunningRollout) -> None:
        """Register a rollout."""
        self._by_key[running.key] = running

    def discard(self, running: RunningRollout) -> None:
        """Remove a rollout, unless a later assignment has taken its place."""
        if self._by_key.get(running.key) is running:
            del self._by_key[running.key]

    def stop_request(self, request_id: str, reason: FinishReason) -> None:
        """Stop all rollouts of a request."""
        for running in self:
            if running.assignment.request_id == request_id:
                running.stop(reason)

    async def wait_pinned_to_others(self, weight_version: int) -> None:
        """Wait until the rollouts that are pinned to versions other than *weight_version* have ended."""
        tasks = [
            running.task
            for running in self
            if running.pinned_version not in (None, weight_version) and running.task is not None
        ]
        if tasks:
            await asyncio.wait(tasks)

    async def hand_over(self, *, grace: float, checkpoint_timeout: float) -> None:
        """Let rollouts finish for *grace* seconds, then stop the others so that other engines continue them.

        The stopped rollouts have *checkpoint_timeout* seconds to write their checkpoints.
        """
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=grace)
        for running in self:
            running.stop(None)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=checkpoint_timeout)

    def abandon(self) -> None:
        """Cancel all rollouts without waiting for them; their last checkpoints stay in Redis."""
        for task in self.tasks:
            task.cancel()
        self._by_key.clear()
