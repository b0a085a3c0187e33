"""Rollouts that end without an engine: cancelled, past their deadline, or without an engine that may sample them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from rollout_api.protocol.messages import FinishReason, Rollout
from rollout_head.coordinator.open_requests import OpenRequest
from rollout_head.coordinator.scheduler import ANY_VERSION, VersionBounds
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.job import EngineReport, JobStore, RolloutEvent

logger = logging.getLogger(__name__)


class UnservedRollouts:
    """Ends the waiting samples that no engine can serve any more, and writes the results of all unserved samples.

    They return their partial output, or no tokens. A client may cancel thousands of rollouts at once, so results are
    written in batches, between which other work is done.
    """

    def __init__(self, state: CoordinatorState, job_store: JobStore, max_rollouts: int) -> None:
        self._state, self._job_store, self._max_rollouts = state, job_store, max_rollouts
        self._next_log: dict[int, float] = {}
        """Weight version that rollouts wait for → ``time.monotonic()`` of the next log message about it."""

    async def find(self) -> None:
        """End the waiting samples whose deadline has passed, or that need weights that no engine will serve."""
        await self._end_overdue()
        self._fail_unserved_versions()

    async def _end_overdue(self) -> None:
        """End the waiting samples of requests whose deadline has passed. Engines end their own samples."""
        if not self._state.with_deadline:
            return
        now = await self._job_store.clock()
        for request in list(self._state.with_deadline.values()):
            if request.deadline is not None and request.deadline <= now:
                self._state.end_waiting(request, FinishReason.DEADLINE)

    def find_blocked(self) -> None:
        """Find the waiting samples that cannot start at the moment.

        They do not count towards spec.queue.maxRollouts, except those of a client that has more of them than that.
        """
        state, unserved = self._state, self._unserved_versions()
        held_back = state.slow_clients | state.silent_clients
        waiting_of, open_of = Counter[str](), Counter[str]()
        for waiting in state.queue.requests() if unserved or held_back else ():
            if waiting.client in held_back or waiting.versions in unserved:
                request = state.requests[waiting.request_id]
                waiting_of[waiting.client] += len(waiting.samples)
                open_of[waiting.client] += request.request.sampling.n - len(request.assigned)
        state.blocked = waiting_of
        state.num_not_limited = sum(min(number, self._max_rollouts) for number in open_of.values())

    def _unserved_versions(self) -> set[VersionBounds]:
        """Return the bounds of waiting samples that no engine serves or loads; none if there are no engines."""
        newest = self._state.newest_version
        served = {report.upcoming_version for report in self._state.engines.values()}
        found = {waiting.versions for waiting in self._state.queue.requests()} - {ANY_VERSION} if served else set()
        return {versions for versions in found if not any(versions.allow(version, newest) for version in served)}

    def _fail_unserved_versions(self) -> None:
        """Fail waiting samples if no engine serves, or will serve, a weight version that may sample them."""
        reports = list(self._state.engines.values())
        unserved = self._unserved_versions()
        if not unserved:
            return
        for request in list(self._state.requests.values()):
            if (bounds := VersionBounds.of(request.request)) in unserved:
                self._fail_or_wait(request, bounds, reports)

    def _fail_or_wait(self, request: OpenRequest, bounds: VersionBounds, reports: Sequence[EngineReport]) -> None:
        desired, newest = self._state.desired_version, self._state.newest_version
        # Engines only load the newest version.
        version = bounds.pinned if bounds.pinned is not None else max(bounds.oldest(newest), newest)
        reasons = [report.failed[version] for report in reports if version in report.failed]
        if version == desired and len(reasons) == len(reports):
            self._state.fail_waiting(request, f"no engine can load weight version {version}: {reasons[0]}")
        elif desired is not None and version < desired:
            detail = f"no engine serves weight version {version} any more; the newest is {desired}"
            self._state.fail_waiting(request, detail)
        else:
            self._log_waiting(version)

    def _log_waiting(self, version: int) -> None:
        now, limits = time.monotonic(), self._state.limits
        if now >= self._next_log.setdefault(version, now + limits.unserved_version_log_delay_s):
            self._next_log[version] = now + limits.unserved_version_log_interval_s
            logger.warning(
                "Rollouts wait for weight version %d, which no engine serves or loads; publish it, or cancel the "
                "requests that need it.",
                version,
            )

    async def finish_batch(self) -> None:
        """Write the results of the next unserved samples."""
        unserved = self._state.unserved
        batch = [unserved.popleft() for _ in range(min(self._state.limits.finish_batch, len(unserved)))]
        batch = [ended for ended in batch if self._state.requests.get(ended.request.request_id) is ended.request]
        if not batch:
            return
        partials = await self._job_store.rollouts.partials([(ended.request.request, ended.sample) for ended in batch])
        results = []
        for (opened, sample, reason, detail), partial in zip(batch, partials, strict=True):
            request = opened.request
            rollout = Rollout.from_request(request, sample, partial or request.prefix, reason, detail=detail)
            results.append((request, rollout))
        await self._job_store.rollouts.finish_all(results)
        for ended, (_, rollout) in zip(batch, results, strict=True):
            # Not left to the event stream, which may be trimmed when so many rollouts end together.
            length = len(rollout.token_ids)
            self._state.record_end(RolloutEvent(ended.request.request_id, ended.sample, length=length))
