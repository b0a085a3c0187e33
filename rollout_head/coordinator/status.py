"""Makes the coordinator's status of its job, and measures what it contains."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry, EnvironmentErrors
from rollout_head.coordinator.distributions import RolloutDistributions
from rollout_head.coordinator.remaining_length import RemainingWork
from rollout_head.limits import MIN_VERIFIED_TOKENS, THROUGHPUT_WINDOW_S
from rollout_store.job import EngineReport
from rollout_store.job.canary import DriftTest


@dataclass(frozen=True)
class StatusInput:
    """What the coordinator knows when it makes a status."""

    uid: str
    coordinator: int
    requests: int
    waiting: int
    assigned: Mapping[str, int]
    """Engine id → number of assigned rollouts."""
    totals: Mapping[str, int]
    engines: Mapping[str, EngineReport]
    """Reports of the live engines by id."""
    engine_errors: dict[str, str]
    """Engines that cannot start, with the reasons."""
    environment_errors: dict[str, EnvironmentErrors]
    """Errors of the environment of a dataset source, by type."""
    engines_lost: int
    dead_letters: int
    weight_version: int
    unread_bytes: dict[str, int]
    slow_clients: list[str]
    remaining: RemainingWork
    """Tokens that the open requests are expected to take."""
    drift: DriftTest
    closing: bool
    paused: bool


class StatusBoard:
    """Makes the coordinator's status and keeps the last one, together with the measurements over time that it needs."""

    def __init__(
        self,
        job: RolloutJob,
        *,
        total_rollouts: int | None = None,
    ) -> None:
        """Create a board without a status.

        Args:
            job: the manifest.
            total_rollouts: number of rollouts in all epochs of a dataset source; None for a job that serves trainers.
        """
        self.last: CoordinatorStatus | None = None
        """The last status; None before the first one."""
        self.distributions = RolloutDistributions()
        """Distributions of what rollouts and weight updates have taken."""
        self._job = f"{job.metadata.namespace}/{job.metadata.name}"
        self._total_rollouts = total_rollouts
        self._throughput, self._savings = _Throughput(), _TimeSavings()
        self._busy_at: dict[str, float] = {}
        """Engine → ``time.monotonic()`` when it last had a rollout, or was discovered."""
        self._updated_at = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the last status was made. The age grows while the coordinator waits for Redis."""
        return time.monotonic() - self._updated_at

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that all engines have sampled over the last seconds."""
        return self._throughput.tokens_per_second

    def update(self, current: StatusInput) -> CoordinatorStatus:
        """Make the status."""
        self._updated_at = now = time.monotonic()
        self._throughput.update(current.engines)
        self._savings.update(current.engines)
        self.distributions.observe_engines(current.engines)
        self._busy_at = {
            engine: now if current.assigned.get(engine) else self._busy_at.get(engine, now)
            for engine in current.engines
        }
        assigned = sum(current.assigned.values())
        work, tail = self._estimate_seconds(current, assigned)
        totals = current.totals
        decoding_steps, accepted_tokens = totals.get("decoding_steps", 0), totals.get("accepted_tokens", 0)
        status: CoordinatorStatus = {
            "job": self._job,
            "uid": current.uid,
            "coordinator": current.coordinator,
            "state": "closing" if current.closing else "paused" if current.paused else "running",
            "weight_version": current.weight_version,
            "requests": current.requests,
            "waiting": current.waiting,
            "assigned": assigned,
            "done": totals.get("rollouts", 0),
            "total": self._total_rollouts,
            "epoch": None if self._total_rollouts is None else current.weight_version,
            "tokens": totals.get("tokens", 0),
            "decoding_steps": decoding_steps,
            "draft_tokens": totals.get("draft_tokens", 0),
            "accepted_tokens": accepted_tokens,
            "accepted_per_step": accepted_tokens / decoding_steps if decoding_steps else 0.0,
            "saved": self._savings.fraction,
            "canaries": current.drift.canaries,
            "drift_e_value": current.drift.e_value,
            "distribution_drift": current.drift.drifted,
            "unverified": [report.name for report in current.engines.values() if _drafts_unverified(report.counters)],
            "tokens_per_second": self.tokens_per_second,
            "remaining_seconds": None if work is None or tail is None else max(work, tail),
            "work_seconds": work,
            "tail_seconds": tail,
            "engines": [self._engine_entry(engine, current, now) for engine in current.engines],
            "engine_errors": current.engine_errors,
            "environment_errors": current.environment_errors,
            "engines_lost": current.engines_lost,
            "dead_letters": current.dead_letters,
            "unread_bytes": current.unread_bytes,
            "slow_clients": current.slow_clients,
        }
        self.last = status
        return status

    def _estimate_seconds(self, current: StatusInput, assigned: int) -> tuple[float | None, float | None]:
        """Estimate the seconds until all work is done, and until the longest rollout ends; None if unknown."""
        if not current.requests:
            return 0.0, 0.0
        if not self.tokens_per_second or not assigned:
            return None, None
        work = current.remaining.total_tokens / self.tokens_per_second
        return work, current.remaining.longest_tokens * assigned / self.tokens_per_second

    def _engine_entry(self, engine: str, current: StatusInput, now: float) -> EngineEntry:
        report = current.engines[engine]
        return {
            "id": engine,
            "name": report.name,
            "worker": report.worker.partition("/")[0],
            "version": report.version,
            "non_speculative": report.non_speculative,
            "speculation_disabled": report.speculation_disabled,
            "draining": report.draining,
            "max_running": report.max_running,
            "assigned": current.assigned.get(engine, 0),
            "tokens_per_second": self._throughput.of_engine(engine),
            "idle_seconds": now - self._busy_at[engine],
            "failed": {str(version): reason for version, reason in report.failed.items()},
            "counters": report.counters,
            "labeled_counters": report.labeled_counters,
        }


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
        while len(self._marks) > 2 and now - self._marks[0][0] > THROUGHPUT_WINDOW_S:
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
    if "proposed_tokens" not in counters or counters.get("tokens", 0.0) < MIN_VERIFIED_TOKENS:
        return False
    if not counters["decoding_steps"]:
        return True
    proposed, verified = counters["proposed_tokens"], counters["draft_tokens"]
    return abs(proposed - verified) > MIN_VERIFIED_TOKENS + 0.5 * max(proposed, verified)
