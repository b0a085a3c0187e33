"""Requests that cannot be served any more: past their deadline, or without an engine of a version that they allow."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rollout_api.protocol.messages import FinishReason
from rollout_head.coordinator.answers import Answers
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.version_bounds import ANY_VERSION, VersionBounds
from rollout_head.coordinator.weights import WeightAnnouncer
from rollout_head.limits import CoordinatorLimits
from rollout_store.job import EngineReport, JobStore

logger = logging.getLogger(__name__)


class UnservableRequests:
    """Ends the waiting samples of requests that no engine can serve any more."""

    def __init__(
        self,
        job_store: JobStore,
        *,
        tracker: RolloutTracker,
        queue: RolloutQueue,
        engines: EngineTracker,
        weights: WeightAnnouncer,
        answers: Answers,
        limits: CoordinatorLimits,
    ) -> None:
        self._job_store, self._tracker, self._queue, self._engines = job_store, tracker, queue, engines
        self._weights, self._answers, self._limits = weights, answers, limits
        self._next_log: dict[int, float] = {}
        """Weight version that rollouts wait for → ``time.monotonic()`` of the next log message about it."""

    async def end_overdue(self) -> None:
        """End the waiting samples of requests whose deadline has passed. Engines end their own samples."""
        if not self._tracker.with_deadline:
            return
        now = await self._job_store.clock()
        for request in list(self._tracker.with_deadline.values()):
            if request.deadline is not None and request.deadline <= now:
                self._answers.end_waiting(request, FinishReason.DEADLINE)

    def fail_unserved_versions(self) -> None:
        """Fail waiting samples if no engine serves, or will serve, a weight version that may sample them."""
        reports = list(self._engines.engines.values())
        newest = self._weights.newest_version
        served = {report.upcoming_version for report in reports}
        unserved = {
            waiting.versions
            for waiting in self._queue.requests()
            if waiting.versions != ANY_VERSION
            and not any(waiting.versions.allow(version, newest) for version in served)
        }
        if not unserved or not reports:
            return
        for request in list(self._tracker.requests.values()):
            if (bounds := VersionBounds.of(request.request)) in unserved:
                self._fail_or_wait(request, bounds, reports)

    def _fail_or_wait(self, request: OpenRequest, bounds: VersionBounds, reports: Sequence[EngineReport]) -> None:
        desired = self._weights.desired_version
        # Engines only load the newest version.
        version = bounds.pinned
        if version is None:
            version = max(bounds.oldest(self._weights.newest_version), self._weights.newest_version)
        reasons = [report.failed[version] for report in reports if version in report.failed]
        if version == desired and len(reasons) == len(reports):
            self._answers.fail_waiting(request, f"no engine can load weight version {version}: {reasons[0]}")
        elif desired is not None and version < desired:
            detail = f"no engine serves weight version {version} any more; the newest is {desired}"
            self._answers.fail_waiting(request, detail)
        else:
            self._log_waiting(version)

    def _log_waiting(self, version: int) -> None:
        now = time.monotonic()
        if now >= self._next_log.setdefault(version, now + self._limits.unserved_version_log_delay_s):
            self._next_log[version] = now + self._limits.unserved_version_log_interval_s
            logger.warning(
                "Rollouts wait for weight version %d, which no engine serves or loads; publish it, or cancel the "
                "requests that need it.",
                version,
            )
