"""The command ``rollout top``: it reads the state of a job, and keeps it up to date."""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.live import Live

from rollout_api.client.job_info import parse_status
from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.messages import CodecError
from rollout_api.protocol.status import EXIT_ENGINE, CoordinatorStatus, EngineEntry
from rollout_api.protocol.timeline import EndedRollout, Measurement
from rollout_api.redis_client.address import split_history_url
from rollout_api.redis_client.connection import check, connect_async, connect_history
from rollout_store.history.engine_reports import REPORT_INTERVAL_S
from rollout_store.history.store import HistoryStore, LengthLookup
from rollout_store.job import JobStore, RolloutProgress
from rollout_store.job.store import MAX_BLOCKING_READ_S
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.job_address import (
    FoundJob,
    JobAddressError,
    JobArgument,
    JobHistoryRedis,
    JobManifest,
    JobRedis,
    JobUid,
    StateDirectory,
    find_job,
)
from rollout_tools.cli.output import exit_with_message

app = typer.Typer()
_WIDTH = 140
"""Columns of the output if it is no terminal."""
console = Console(width=None if sys.stdout.isatty() else _WIDTH)

_REPORT_WAIT_S = 1.5
"""Seconds within which all engines report their running rollouts after they are observed."""


@app.command()
def top(
    job: JobArgument = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    history_redis: JobHistoryRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    once: Annotated[bool, typer.Option("--once", help="Print the current state once, and exit.")] = False,
) -> None:
    """Watch a job live: its engines, the running rollouts and their predicted lengths, and what drafting saves.

    Instead of a job, the URL of a history shows the engines that trainers run themselves and that use this history.

    If the output is no terminal, the state is printed once.
    """
    from rollout_tools.cli.job_status import read_snapshot
    from rollout_tools.cli.top_view import whole_view

    once = once or not console.is_terminal
    if job is not None and "://" in job:
        _show_own_engines(job, once=once)
        return
    with exit_with_message(file, redis or "", interrupted="the job continues"):
        found = find_job(job, file=file, redis_url=redis, uid=uid, state=state_dir)
        history = history_redis or found.history_url
        if once:
            live = asyncio.run(_read_once(found, history))
            if live is None:
                with found.connected() as server:
                    state = read_snapshot(server, found).state_text
                exit_with_error(EXIT_ENGINE, f"job {found.name} is {state}; see `rollout status`")
            console.print(whole_view(live, time.time()))
        else:
            asyncio.run(_watch(found, history))


def _show_own_engines(url: str, *, once: bool) -> None:
    from rollout_tools.cli.top_view import own_engines_view

    with exit_with_message(None, url, interrupted="the engines continue"):
        try:
            server, history = split_history_url(url)
        except ValueError as error:
            raise JobAddressError(str(error)) from None
        store = HistoryStore.for_all_generations(connect_history(server), HistoryKeys.from_full_name(history))
        check(store.client, server)
        if once:
            console.print(own_engines_view(history, store.engines.read()))
            return
        with Live(console=console) as live:
            while True:
                live.update(own_engines_view(history, store.engines.read()))
                time.sleep(REPORT_INTERVAL_S)


async def _read_once(found: FoundJob, history_url: str) -> LiveJob | None:
    reader = LiveJobReader(found.redis_url, found.uid, history_url)
    try:
        if await reader.read() is None:
            return None
        await asyncio.sleep(_REPORT_WAIT_S)
        return await reader.read()
    finally:
        await reader.close()


async def _watch(found: FoundJob, history_url: str) -> None:
    from rollout_tools.cli.top_view import TopApp

    reader = LiveJobReader(found.redis_url, found.uid, history_url)
    try:
        await TopApp(found.name, reader.read).run_async()
    finally:
        await reader.close()


RECENT_S = 300.0
"""Seconds over which what has ended recently is summed up."""
MAX_RECENT = 5000
"""Number of rollouts that have ended lately that are kept."""
MAX_MEASUREMENTS = 240
"""Number of latest measurements that are kept."""


class RunningRollout(NamedTuple):
    """A running rollout, and how long it is expected to become."""

    engine: str
    """Name of its engine."""
    progress: RolloutProgress
    median: float | None
    """Length that it does not exceed with probability 0.5, given its length so far; None if it is unknown."""
    high: float | None
    """The same with probability 0.9."""
    surprise: float | None
    """Share of the problem's earlier rollouts that were at most as long as it is now; None without any."""

    @property
    def expected_remaining(self) -> float:
        """Tokens that it probably still generates; up to its limit if nothing is known."""
        end = self.progress.max_tokens if self.median is None else min(self.median, self.progress.max_tokens)
        return max(0.0, end - self.progress.tokens)


class Acceptance(NamedTuple):
    """Draft tokens of one kind."""

    label: str
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Share of them that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass
class LiveJob:
    """What is known of a job at one moment."""

    status: CoordinatorStatus
    running: Sequence[RunningRollout] = ()
    """Running rollouts, those that are expected to end last first."""
    recent: deque[EndedRollout] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Rollouts that have ended lately, oldest first."""
    measurements: deque[Measurement] = field(default_factory=lambda: deque(maxlen=MAX_MEASUREMENTS))

    @property
    def seconds_saved(self) -> float:
        """Seconds of decoding that drafting has saved on all live engines, by their cost models."""
        counters = [engine["counters"] for engine in self.status["engines"]]
        return sum(each.get("timed_seconds_without_drafts", 0.0) - each.get("timed_seconds", 0.0) for each in counters)

    @property
    def num_beyond_median(self) -> int:
        """Number of running rollouts that are longer than half of the earlier rollouts of their problems."""
        return sum(one.surprise is not None and one.surprise >= 0.5 for one in self.running)

    def staleness(self, now: float) -> tuple[float, int] | None:
        """Return the mean and the largest staleness of the rollouts that have ended lately; None without any."""
        newest = self.status["weight_version"]
        ages = [
            max(0, newest - one.oldest_version)
            for one in self.recent
            if one.oldest_version is not None and one.finished_at > now - RECENT_S
        ]
        return (statistics.fmean(ages), max(ages)) if ages else None


def acceptance_of(counters: Iterable[Mapping[str, Mapping[str, int]]], kind: str) -> list[Acceptance]:
    """Return the acceptance of draft tokens by ``source`` or by ``position``, from the labeled counters of engines."""
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for one in counters:
        for total, name in ((drafted, "draft"), (accepted, "accepted")):
            for label, count in one.get(f"{kind}_{name}_tokens", {}).items():
                total[label] = total.get(label, 0) + count
    return [Acceptance(label, count, accepted.get(label, 0)) for label, count in drafted.items() if count]


def predicted(
    progress: Mapping[str, Iterable[RolloutProgress]],
    lengths: Mapping[str, LengthStats],
    engines: Iterable[EngineEntry],
) -> list[RunningRollout]:
    """Return the running rollouts of live engines, those that are expected to end last first.

    *progress* has the running rollouts by engine id, and *lengths* the statistics of earlier rollouts by problem id.
    """
    names = {engine["id"]: engine["name"] for engine in engines}
    running = [
        _predict(names[engine], one, lengths.get(one.problem_id))
        for engine, rollouts in progress.items()
        if engine in names
        for one in rollouts
    ]
    return sorted(running, key=lambda one: (-one.expected_remaining, -one.progress.tokens, one.progress.request_id))


def _predict(engine: str, progress: RolloutProgress, stats: LengthStats | None) -> RunningRollout:
    if stats is None or not stats.count:
        return RunningRollout(engine, progress, None, None, None)
    return RunningRollout(
        engine,
        progress,
        stats.quantile(0.5, so_far=progress.tokens),
        stats.quantile(0.9, so_far=progress.tokens),
        1.0 - stats.prob_longer_than(progress.tokens),
    )


logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 30.0
"""Seconds that the last status is still shown after it has expired."""


class LiveJobReader:
    """Reads the state of one job. Engines report their running rollouts while it is read."""

    def __init__(self, url: str, uid: str, history_url: str = "") -> None:
        """Open the state of a job for the caller's asyncio event loop.

        Args:
            url: URL of the job's Redis.
            uid: the job's uid.
            history_url: URL of the Redis that keeps the history; empty for the job's. Without it, the lengths of the
                rollouts of a job whose history is on another server are not predicted.
        """
        self._client = connect_async(url, block=MAX_BLOCKING_READ_S)
        self._store = JobStore(self._client, MessageKeys(uid))
        self._url, self._history_url = url, history_url
        self._job: LiveJob | None = None
        self._lengths: LengthLookup | None = None
        self._last_ended = ""
        self._read_status_at = 0.0

    async def read(self) -> LiveJob | None:
        """Return the current state; None if no coordinator runs.

        Raises:
            redis.RedisError: if Redis cannot be used.
        """
        timeline = self._store.timeline
        await timeline.observe()
        published: Any = await self._client.get(self._store.keys.status)
        status = parse_status(published)
        now = time.monotonic()
        if status is None:
            if now - self._read_status_at > _STATUS_INTERVAL_S:
                self._job = None
            return self._job
        self._read_status_at = now
        if self._job is None:
            self._job = LiveJob(status)
            await self._begin(self._job)
        self._job.status = status
        progress = await timeline.running()
        problems = {one.problem_id for rollouts in progress.values() for one in rollouts}
        lengths = {} if self._lengths is None or not problems else await self._lengths.fetch(problems)
        self._job.running = predicted(progress, lengths, status["engines"])
        await self._read_ended(self._job)
        return self._job

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()

    async def _begin(self, job: LiveJob) -> None:
        """Read what has happened lately."""
        description: list[Any] = await self._client.hmget(self._store.keys.job, ["history", "history_redis"])
        history, elsewhere = (value.decode() if value else "" for value in description)
        url = self._history_url or (None if elsewhere else self._url)
        if history and url:
            store = HistoryStore.for_all_generations(connect_history(url), HistoryKeys.from_full_name(history))
            self._lengths = LengthLookup(store)
        began = int((await self._store.clock() - RECENT_S) * 1000)
        self._last_ended = f"{max(0, began)}-0"
        job.measurements.extend(await self._store.timeline.last_measurements(job.measurements.maxlen or 0))

    async def _read_ended(self, job: LiveJob) -> None:
        timeline = self._store.timeline
        try:
            while entries := await timeline.ended(self._last_ended):
                job.recent.extend(entry.rollout for entry in entries)
                self._last_ended = entries[-1].entry_id
            last = job.measurements[-1].time if job.measurements else 0.0
            job.measurements.extend(one for one in await timeline.last_measurements(2) if one.time > last)
        except CodecError as error:
            logger.debug("The timeline cannot be read: %s", error)
