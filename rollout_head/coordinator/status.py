"""Builds the coordinator's status of its job from its state and from measurements over time, and publishes it."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry, EnvironmentErrors
from rollout_head.coordinator.distributions import RolloutDistributions
from rollout_head.coordinator.state import CoordinatorState
from rollout_head.coordinator.timeline import TimelineRecorder
from rollout_store.history.remaining_length import RemainingWork, estimate_remaining_work
from rollout_store.job import EngineReport, JobStore
from rollout_store.job.streams import CONFLICTS

logger = logging.getLogger(__name__)

_THROUGHPUT_WINDOW_S = 10.0
"""Seconds over which the speed of sampling is averaged."""
_MIN_VERIFIED_TOKENS = 4096
"""Number of tokens by which drafts may be unverified: they may be in flight, or belong to preempted rollouts."""
_MAX_ESTIMATING_SHARE = 0.05
"""Share of the time that may be spent on estimates of the remaining work."""


class StatusBuilder:
    """Builds the coordinator's status, keeps the last one, and takes the measurements over time that it needs."""

    def __init__(
        self, state: CoordinatorState, job: RolloutJob, uid: str, *, total_rollouts: int | None = None
    ) -> None:
        """Create a builder without a status.

        Args:
            state: the coordinator's state.
            job: the manifest.
            uid: uid of the job.
            total_rollouts: number of rollouts in all epochs of a dataset source; None for a job that serves trainers.
        """
        self.last: CoordinatorStatus | None = None
        """The last status; None before the first one."""
        self.distributions = RolloutDistributions()
        """Distributions of what rollouts and weight updates have taken."""
        self._state, self._job, self._uid = state, f"{job.metadata.namespace}/{job.metadata.name}", uid
        self._total_rollouts = total_rollouts
        self._throughput, self._savings = _Throughput(), _TimeSavings()
        self._busy_at: dict[str, float] = {}
        """Engine → ``time.monotonic()`` when it last had a rollout, or was discovered."""
        self._updated_at = 0.0
        self._remaining = RemainingWork(0.0, 0.0)
        self._next_estimate = 0.0
        """``time.monotonic()`` of the next estimate of the remaining work."""

    @property
    def age_s(self) -> float:
        """Seconds since the last status was made. The age grows while the coordinator waits for Redis."""
        return time.monotonic() - self._updated_at

    def update(
        self, totals: Mapping[str, int], engine_errors: dict[str, str], environment_errors: dict[str, EnvironmentErrors]
    ) -> CoordinatorStatus:
        """Build the status of this moment.

        Args:
            totals: sums over all rollouts of the job that have ended.
            engine_errors: engines that cannot start, with the reasons.
            environment_errors: errors of the environment of a dataset source, by type.
        """
        state, drift = self._state, self._state.canaries.drift
        self._updated_at = now = time.monotonic()
        self._throughput.update(state.engines)
        self._savings.update(state.engines)
        self.distributions.observe_engines(state.engines)
        self._busy_at = {
            engine: now if state.assigned.get(engine) else self._busy_at.get(engine, now) for engine in state.engines
        }
        work, tail = self._estimate_seconds(now)
        decoding_steps, accepted_tokens = totals.get("decoding_steps", 0), totals.get("accepted_tokens", 0)
        status: CoordinatorStatus = {
            "job": self._job,
            "uid": self._uid,
            "coordinator": state.coordinator,
            "state": "closing" if state.closing else "running" if state.pause_mode is None else "paused",
            "weight_version": state.newest_version,
            "requests": len(state.requests),
            "waiting": state.queue.num_waiting,
            "assigned": state.num_assigned,
            "done": totals.get("rollouts", 0),
            "total": self._total_rollouts,
            "epoch": None if self._total_rollouts is None else state.newest_version,
            "tokens": totals.get("tokens", 0),
            "decoding_steps": decoding_steps,
            "draft_tokens": totals.get("draft_tokens", 0),
            "accepted_tokens": accepted_tokens,
            "accepted_per_step": accepted_tokens / decoding_steps if decoding_steps else 0.0,
            "saved": self._savings.fraction,
            "canaries": drift.canaries,
            "drift_e_value": drift.e_value,
            "distribution_drift": drift.drifted,
            "unverified": [report.name for report in state.engines.values() if _drafts_unverified(report.counters)],
            "tokens_per_second": self._throughput.tokens_per_second,
            "remaining_seconds": None if work is None or tail is None else max(work, tail),
            "work_seconds": work,
            "tail_seconds": tail,
            "engines": [self._engine_entry(engine, report, now) for engine, report in state.engines.items()],
            "engine_errors": engine_errors,
            "environment_errors": environment_errors,
            "engines_lost": state.num_lost_engines,
            "dead_letters": state.num_dead_letters,
            "conflicts": totals.get(CONFLICTS, 0),
            "unread_bytes": state.unread_bytes,
            "slow_clients": sorted(state.slow_clients),
            "silent_clients": sorted(state.silent_clients),
            "blocked": dict(state.blocked),
        }
        self.last = status
        return status

    def _estimate_seconds(self, now: float) -> tuple[float | None, float | None]:
        """Estimate the seconds until all work is done, and until the longest rollout ends; None if unknown."""
        if not self._state.requests:
            return 0.0, 0.0
        assigned, speed = self._state.num_assigned, self._throughput.tokens_per_second
        if not speed or not assigned:
            return None, None
        speed_of_rollout = speed / assigned
        if now >= self._next_estimate:
            requests = self._state.requests.values()
            self._remaining = estimate_remaining_work(
                rollouts for request in requests for rollouts in request.remaining_work(speed_of_rollout, now)
            )
            ended = time.monotonic()
            self._next_estimate = ended + (ended - now) / _MAX_ESTIMATING_SHARE
        return self._remaining.total_tokens / speed, self._remaining.longest_tokens / speed_of_rollout

    def _engine_entry(self, engine: str, report: EngineReport, now: float) -> EngineEntry:
        return {
            "id": engine,
            "name": report.name,
            "worker": report.worker.partition("/")[0],
            "version": report.version,
            "non_speculative": report.non_speculative,
            "speculation_disabled": report.speculation_disabled,
            "draining": report.draining,
            "max_running": report.max_running,
            "assigned": len(self._state.assigned.get(engine, ())),
            "tokens_per_second": self._throughput.of_engine(engine),
            "idle_seconds": round(now - self._busy_at[engine], 1),
            "failed": {str(version): reason for version, reason in report.failed.items()},
            "counters": report.counters,
            "labeled_counters": report.labeled_counters,
        }


class StatusPublisher:
    """Publishes the status for clients, the canary test for later coordinators, and the timeline for reports."""

    def __init__(
        self, state: CoordinatorState, job_store: JobStore, builder: StatusBuilder, timeline: TimelineRecorder
    ) -> None:
        self._state, self._job_store, self._builder, self._timeline = state, job_store, builder, timeline
        self._stored_canaries = 0
        """Number of canaries in the state that was last stored."""

    async def restore(self) -> None:
        """Continue the canary test of an earlier coordinator, if its state can be read."""
        try:
            if (stored := await self._job_store.job.canaries()) is not None:
                self._state.canaries.load_json(stored)
                self._stored_canaries = self._state.canaries.drift.canaries
        except ValueError as error:
            logger.warning(
                "Cannot read the state of the canary test in %s; the test goes on without the canaries of earlier "
                "coordinators: %s",
                self._job_store.keys.canaries,
                error,
            )

    async def publish(self) -> None:
        """Publish the current state."""
        status = self._builder.update(
            await self._job_store.rollouts.totals(),
            await self._job_store.engines.failed(),
            await self._job_store.job.environment_errors(),
        )
        await self._job_store.job.set_status(self._state.coordinator, json.dumps(status).encode())
        canaries = self._state.canaries
        if canaries.drift.canaries != self._stored_canaries:
            self._stored_canaries = canaries.drift.canaries
            await self._job_store.job.set_canaries(self._state.coordinator, canaries.to_json())
        await self._timeline.record(status)


class _Throughput:
    """Measures how many tokens per second the engines sample, averaged over the last seconds."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        """Speed of all engines together."""
        self._sampled: dict[str, float] = {}
        """Engine → tokens that it had sampled at its last report."""
        self._total = 0.0
        self._marks: deque[tuple[float, float, Mapping[str, float]]] = deque()
        """Time, total, and tokens of each live engine at each update within the window."""

    def update(self, engines: Mapping[str, EngineReport]) -> None:
        now = time.monotonic()
        current = {engine: report.counters.get("tokens", 0.0) for engine, report in engines.items()}
        for engine, sampled in current.items():
            self._total += max(0.0, sampled - self._sampled.get(engine, sampled))
            self._sampled[engine] = sampled
        self._marks.append((now, self._total, current))
        while len(self._marks) > 2 and now - self._marks[0][0] > _THROUGHPUT_WINDOW_S:
            self._marks.popleft()
        seconds = now - self._marks[0][0]
        self.tokens_per_second = (self._total - self._marks[0][1]) / seconds if seconds else 0.0

    def of_engine(self, engine: str) -> float:
        """Return the tokens per second of one engine since its first report within the window."""
        marks = [(at, sampled[engine]) for at, _, sampled in self._marks if engine in sampled]
        if len(marks) < 2:
            return 0.0
        (started, before), (ended, after) = marks[0], marks[-1]
        return max(0.0, after - before) / (ended - started) if ended > started else 0.0


class _TimeSavings:
    """Compares the decoding time of all engines with what it would have been without drafts."""

    def __init__(self) -> None:
        self._seconds: dict[str, tuple[float, float]] = {}
        """Engine → seconds of its timed steps, and what they would have taken without drafts."""

    @property
    def fraction(self) -> float | None:
        """Fraction of the decoding time that drafting has saved; negative if it cost time, None if unknown."""
        if not self._seconds:
            return None
        actual, without_drafts = (sum(seconds) for seconds in zip(*self._seconds.values(), strict=True))
        return 1 - actual / without_drafts if without_drafts else None

    def update(self, engines: Mapping[str, EngineReport]) -> None:
        for engine, report in engines.items():
            if "timed_seconds" in report.counters:
                without_drafts = report.counters["timed_seconds_without_drafts"]
                self._seconds[engine] = report.counters["timed_seconds"], without_drafts


def _drafts_unverified(counters: Mapping[str, float]) -> bool:
    """Return whether vLLM verifies other drafts than those that are proposed: none of them, or different ones."""
    if "proposed_tokens" not in counters or counters.get("tokens", 0.0) < _MIN_VERIFIED_TOKENS:
        return False
    if not counters["decoding_steps"]:
        return True
    proposed, verified = counters["proposed_tokens"], counters["draft_tokens"]
    return abs(proposed - verified) > _MIN_VERIFIED_TOKENS + 0.5 * max(proposed, verified)
