"""What a job says of itself: one JSON document, and the same as Prometheus metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_worker.job.job_store import EngineReport
from rollout_worker.policy.canary import DriftTest
from rollout_worker.policy.remaining_length import WorkAhead

_RATE_WINDOW_S = 10.0
_TELLING_TOKENS = 4096
"""Fewer may be under way, or lost by rollouts that were preempted."""


class EngineStatus(TypedDict):
    """One engine, as it reported last."""

    id: str
    name: str
    worker: str
    """Name of its worker."""
    version: int
    plain: bool
    given_up: bool
    """It goes on without speculation, since drafting did not pay."""
    draining: bool
    slots: int
    assigned: int
    """Rollouts that it has."""
    idle_seconds: float
    """Since it had one last."""
    failed: dict[str, str]
    counters: dict[str, float]


class JobStatus(TypedDict):
    """The whole job; also the body of ``GET /status``."""

    job: str
    uid: str
    coordinator: int
    state: str
    weight_version: int
    requests: int
    """Open requests."""
    waiting: int
    """Rollouts that no engine has yet."""
    assigned: int
    """Rollouts that engines have and have not ended."""
    done: int
    total: int | None
    """Rollouts of a dataset source in all its epochs."""
    epoch: int | None
    """Of a dataset source."""
    tokens: int
    steps: int
    """Decoding steps of all ended rollouts, by the engines that ended them; so are drafted and accepted tokens."""
    drafted: int
    accepted: int
    accepted_per_step: float
    saved: float | None
    """Share of decoding time that drafts saved, by what steps without drafts would have cost; None if unknown."""
    canaries: int
    """Rollouts without drafts that were compared with their siblings."""
    drift_e_value: float
    """For drafts changing what is sampled: not expected to grow from 1 while they do not."""
    distribution_drift: bool
    unverified: list[str]
    """Engines whose drafts do not reach the model as they are made."""
    tokens_per_second: float
    seconds_left: float | None
    """Until all open requests are answered, at the speed of the last seconds; None if there is no telling."""
    work_seconds: float | None
    """The same if all engines were busy to the end."""
    tail_seconds: float | None
    """Until the rollout that has most ahead ends, if it began now; more engines do not shorten it."""
    engines: list[EngineStatus]
    engine_errors: dict[str, str]
    """Engines that do not start, and why."""
    engines_lost: int
    moved: int
    """Rollouts that were moved to an idle engine, as this coordinator saw it."""
    dead_letters: int
    unread: dict[str, int]
    """Results that each client has not read yet."""
    slow_clients: list[str]


class StatusBoard:
    """Makes the status, with the speeds that need a memory of a few seconds."""

    def __init__(self, job: RolloutJob) -> None:
        self.dead = 0
        """Messages moved to the dead letters by this coordinator."""
        self.engines_lost = 0
        self.moved = 0
        """Rollouts that went on on another engine because that was idle."""
        self.rollouts: int | None = None
        """How many there are in all epochs of a dataset source."""
        self.engine_errors: Mapping[str, str] = {}
        self.unread: dict[str, int] = {}
        self.last: JobStatus | None = None
        self._job = f"{job.metadata.namespace}/{job.metadata.name}"
        self.speed = 0.0
        """Tokens a second that all engines sampled over the last seconds."""
        self._marks: deque[tuple[float, float]] = deque()
        self._sampled: dict[str, float] = {}
        self._tokens = 0.0
        self._timed: dict[str, tuple[float, float]] = {}
        """Engine → seconds of its steps that were timed, and what they would have taken without drafts."""
        self._busy: dict[str, float] = {}
        """Engine → when it had a rollout last, or came."""
        self._made = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last status was made: many, while the coordinator waits for Redis."""
        return time.monotonic() - self._made

    def status(
        self,
        *,
        uid: str,
        coordinator: int,
        requests: int,
        waiting: int,
        assigned: Mapping[str, int],
        totals: Mapping[str, int],
        engines: Mapping[str, EngineReport],
        weight_version: int,
        slow: list[str],
        ahead: WorkAhead,
        canaries: DriftTest,
        closing: bool,
    ) -> JobStatus:
        """The status now.

        *assigned* are the rollouts of each engine; *ahead* is what open requests are expected to take.
        """
        self._made = now = time.monotonic()
        self._busy = {one: now if assigned.get(one) else self._busy.get(one, now) for one in engines}
        self.speed = speed = self._speed(engines)
        running = sum(assigned.values())
        steps, accepted = totals.get("steps", 0), totals.get("accepted", 0)
        work = tail = left = None if requests else 0.0
        if speed and running and requests:
            work, tail = ahead.tokens / speed, ahead.longest * running / speed
            left = max(work, tail)
        self.last = {
            "job": self._job,
            "uid": uid,
            "coordinator": coordinator,
            "state": "closing" if closing else "running",
            "weight_version": weight_version,
            "requests": requests,
            "waiting": waiting,
            "assigned": sum(assigned.values()),
            "done": totals.get("rollouts", 0),
            "total": self.rollouts,
            "epoch": None if self.rollouts is None else weight_version,
            "tokens": totals.get("tokens", 0),
            "steps": steps,
            "drafted": totals.get("drafted", 0),
            "accepted": accepted,
            "accepted_per_step": accepted / steps if steps else 0.0,
            "saved": self._saved(engines),
            "canaries": canaries.canaries,
            "drift_e_value": canaries.evidence,
            "distribution_drift": canaries.drifted,
            "unverified": [report.name for report in engines.values() if _unverified(report.counters)],
            "tokens_per_second": speed,
            "seconds_left": left,
            "work_seconds": work,
            "tail_seconds": tail,
            "engines": [
                {
                    "id": engine,
                    "name": report.name,
                    "worker": report.worker.partition("/")[0],
                    "version": report.version,
                    "plain": report.plain,
                    "given_up": report.given_up,
                    "draining": report.draining,
                    "slots": report.slots,
                    "assigned": assigned.get(engine, 0),
                    "idle_seconds": now - self._busy[engine],
                    "failed": {str(version): reason for version, reason in report.failed.items()},
                    "counters": report.counters,
                }
                for engine, report in engines.items()
            ],
            "engine_errors": dict(self.engine_errors),
            "engines_lost": self.engines_lost,
            "moved": self.moved,
            "dead_letters": self.dead,
            "unread": self.unread,
            "slow_clients": slow,
        }
        return self.last

    def _saved(self, engines: Mapping[str, EngineReport]) -> float | None:
        """Over the whole life of all engines that this coordinator has known."""
        for engine, report in engines.items():
            if "timed_seconds" in report.counters:
                without = report.counters["timed_seconds_without_drafts"]
                self._timed[engine] = report.counters["timed_seconds"], without
        seconds, without = (sum(one) for one in zip(*self._timed.values(), strict=True)) if self._timed else (0.0, 0.0)
        return 1 - seconds / without if without else None

    def _speed(self, engines: Mapping[str, EngineReport]) -> float:
        """Tokens a second that all engines sampled over the last seconds."""
        now = time.monotonic()
        for engine, report in engines.items():
            sampled = report.counters.get("tokens", 0.0)
            self._tokens += max(0.0, sampled - self._sampled.get(engine, sampled))
            self._sampled[engine] = sampled
        self._marks.append((now, self._tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        seconds = now - self._marks[0][0]
        return (self._tokens - self._marks[0][1]) / seconds if seconds else 0.0


def _unverified(counters: Mapping[str, float]) -> bool:
    """Whether vLLM verifies other drafts than are proposed: none of them, or ones that nobody proposed."""
    if "proposed_tokens" not in counters or counters.get("tokens", 0.0) < _TELLING_TOKENS:
        return False
    if not counters["steps"]:
        return True
    proposed, verified = counters["proposed_tokens"], counters["drafted"]
    return abs(proposed - verified) > _TELLING_TOKENS + 0.5 * max(proposed, verified)


class StatusCollector:
    """The board's last status as Prometheus metrics, labelled by job and engine, never by prompt."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """For ``prometheus_client``: one family for each figure."""
        status = self._board.last
        if status is None:
            return
        job = [status["job"]]
        gauges: dict[str, tuple[str, float]] = {
            "requests_open": ("Requests taken up and not answered in full.", status["requests"]),
            "rollouts_waiting": ("Rollouts that no engine has yet.", status["waiting"]),
            "rollouts_assigned": ("Rollouts that engines are making.", status["assigned"]),
            "engines": ("Engines whose lease holds.", len(status["engines"])),
            "engines_failed": ("Engines that do not start.", len(status["engine_errors"])),
            "status_age_seconds": ("Since these figures were made: many, while Redis is away.", self._board.age),
            "weight_version": ("The weight version to be served.", status["weight_version"]),
            "drift_e_value": ("For drafts changing what is sampled: 1000 is an alarm.", status["drift_e_value"]),
            "distribution_drift": ("Whether drafts change what is sampled.", float(status["distribution_drift"])),
            "engines_given_up": (
                "Engines without speculation, as drafting did not pay.",
                sum(engine["given_up"] for engine in status["engines"]),
            ),
            "engines_unverified": ("Engines whose drafts do not reach the model.", len(status["unverified"])),
            "tokens_per_second": ("Response tokens a second, lately.", status["tokens_per_second"]),
        }
        if status["saved"] is not None:
            gauges["saved_ratio"] = ("Share of decoding time that drafts saved.", status["saved"])
        if status["seconds_left"] is not None:
            gauges["left_seconds"] = ("Until all open requests are answered.", status["seconds_left"])
        if status["tail_seconds"] is not None:
            gauges["tail_seconds"] = ("Until the rollout that has most ahead ends.", status["tail_seconds"])
        for name, (text, value) in gauges.items():
            yield _family(GaugeMetricFamily, name, text, ["job"], [(job, value)])
        counters: dict[str, tuple[str, float]] = {
            "rollouts": ("Rollouts that ended.", status["done"]),
            "tokens": ("Response tokens of ended rollouts.", status["tokens"]),
            "steps": ("Decoding steps of ended rollouts.", status["steps"]),
            "drafted_tokens": ("Draft tokens verified.", status["drafted"]),
            "accepted_tokens": ("Draft tokens accepted.", status["accepted"]),
            "canaries": ("Rollouts without drafts, compared with their siblings.", status["canaries"]),
            "engines_lost": ("Engines lost, as this coordinator saw it.", status["engines_lost"]),
            "rollouts_moved": ("Rollouts moved to an idle engine, as this coordinator saw it.", status["moved"]),
            "dead_letters": ("Messages that could not be read, as this coordinator saw it.", status["dead_letters"]),
        }
        for name, (text, value) in counters.items():
            yield _family(CounterMetricFamily, name, text, ["job"], [(job, value)])
        unread = [([*job, client], count) for client, count in status["unread"].items()]
        yield _family(GaugeMetricFamily, "results_unread", "Results not read yet.", ["job", "client"], unread)
        names = sorted({name for engine in status["engines"] for name in engine["counters"]})
        for name in names:
            rows = [
                ([*job, engine["name"]], engine["counters"][name])
                for engine in status["engines"]
                if name in engine["counters"]
            ]
            yield _family(
                GaugeMetricFamily, f"engine_{name}", "As the engine reported it last.", ["job", "engine"], rows
            )


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    rows: Sequence[tuple[list[str], float]],
) -> Metric:
    family = kind(f"rollout_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
