"""The rollouts that wait for an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollout_api.protocol.messages import DraftMode
from rollout_head.coordinator.open_requests import OpenRequest, SiblingGroup
from rollout_head.coordinator.scheduler import EngineLoad, Placement, ProbeThenLongest, VersionBounds, WaitingRequest
from rollout_store.job.assignments import RolloutKey


class RolloutQueue:
    """Queues samples for the scheduler, and remembers how often engines were lost with them.

    A rollout that several engines were lost with may be the cause. It is isolated: an engine gets at most one such
    rollout at a time, so that it cannot take other suspects with it.

    Args:
        isolation_threshold: a rollout is isolated once this many engines were lost with it.
    """

    def __init__(self, isolation_threshold: int) -> None:
        self._scheduler, self._isolation_threshold = ProbeThenLongest(), isolation_threshold
        self._loss_counts: dict[str, int] = {}
        """Rollout id → number of engines lost with it since it last made progress."""
        self._partial_ids: set[str] = set()
        """Rollouts that may have a partial to continue from."""
        self._isolated: set[RolloutKey] = set()

    def restore(self, loss_counts: dict[str, int], partial_ids: set[str]) -> None:
        """Replace what is known about losses and partials by what Redis contains."""
        self._loss_counts, self._partial_ids = loss_counts, partial_ids

    @property
    def num_waiting(self) -> int:
        """Number of waiting samples."""
        return self._scheduler.waiting()

    def requests(self) -> Iterator[WaitingRequest]:
        """Yield all requests with waiting samples."""
        return self._scheduler.requests()

    def probed_groups(self) -> Iterator[str]:
        """Yield the names of the groups that have both waiting and started samples."""
        return self._scheduler.probed_groups()

    def add(
        self, request: OpenRequest, samples: list[int], group: SiblingGroup, preferred_engine: str | None = None
    ) -> None:
        """Queue samples of a request.

        Args:
            request: the request.
            samples: the samples.
            group: the request and those with siblings of its samples.
            preferred_engine: id of the engine that has the request's prefix cached.
        """
        isolated = {
            (request.request_id, sample)
            for sample in samples
            if self.loss_count(request.rollout_id(sample)) >= self._isolation_threshold
        }
        self._isolated |= isolated
        self._scheduler.add(
            WaitingRequest(
                request.request_id,
                request.request.reply_to,
                samples,
                request.arrival,
                request.request.priority,
                request.predicted_length,
                probed=group.started,
                versions=VersionBounds.of(request.request),
                non_speculative=request.request.draft_mode is DraftMode.OFF,
                preferred_engine=preferred_engine,
                isolated=bool(isolated),
                group=group.name,
            )
        )

    def remove(self, request_id: str) -> list[int]:
        """Remove and return the waiting samples of a request."""
        return self._scheduler.remove(request_id)

    def update_prediction(self, group: str, length: float) -> None:
        """Reorder a group of siblings, whose samples are expected to have *length* tokens."""
        self._scheduler.predict(group, length)

    def place(
        self,
        engines: Sequence[EngineLoad],
        slow_clients: frozenset[str],
        requests: Mapping[str, OpenRequest],
        newest_version: int,
    ) -> list[Placement]:
        """Remove and return the samples that can start now, with an engine for each.

        Args:
            engines: the engines that take work.
            slow_clients: clients whose rollouts must not start.
            requests: all open requests by id.
            newest_version: newest published weight version.
        """
        occupied = frozenset(
            request.assigned[sample]
            for request_id, sample in self._isolated
            if (request := requests.get(request_id)) is not None and sample in request.assigned
        )
        return self._scheduler.place(engines, slow_clients, occupied, newest_version)

    def may_have_partial(self, rollout_id: str) -> bool:
        """Return whether a rollout may have a partial that an engine can continue."""
        return rollout_id in self._partial_ids

    def add_partials(self, rollout_ids: set[str]) -> None:
        """Record that rollouts may have partials."""
        self._partial_ids |= rollout_ids

    def loss_count(self, rollout_id: str) -> int:
        """Return how many engines were lost with a rollout since it last made progress."""
        return self._loss_counts.get(rollout_id, 0)

    def set_loss_counts(self, counts: Mapping[str, int]) -> None:
        """Record how many engines were lost with rollouts."""
        self._loss_counts |= counts

    def forget_rollout(self, rollout_id: str) -> None:
        """Forget the losses and the partial of a rollout that has ended."""
        self._loss_counts.pop(rollout_id, None)
        self._partial_ids.discard(rollout_id)

    def end_isolation(self, key: RolloutKey) -> None:
        """Forget that a rollout that is no longer assigned was isolated; queueing it again isolates it again."""
        self._isolated.discard(key)

    def forget_request(self, request_id: str) -> None:
        """Remove a request that was answered."""
        self._isolated = {key for key in self._isolated if key[0] != request_id}
        self._scheduler.remove(request_id)
