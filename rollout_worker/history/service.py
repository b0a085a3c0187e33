"""Looks after every history on a server, for as long as it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import passes
from rollout_worker.history.connection import RedisUnusableError
from rollout_worker.history.maintenance import LEASE_S, PASS_EVERY_S, RETENTION_S, HistoryMaintainer, Pass, pause_after
from rollout_worker.history.server_functions import Redis
from rollout_worker.history.store import histories

logger = logging.getLogger(__name__)

_AWAY = redis.RedisError | redis.exceptions.RedisClusterException | RedisUnusableError
_LONGEST_PAUSE_S = 300.0
_SAY_EVERY_S = 30.0
_TICK_S = LEASE_S / 3


@dataclass
class HistoryFigures:
    """What the service knows of one history, and has done to it."""

    history: str
    leading: bool = False
    """Whether this service looks after it, and not another one."""
    last: Pass | None = None
    """The last pass that was this service's."""
    passes: int = 0
    failed_passes: int = 0
    compacted: int = 0
    empty: int = 0
    trimmed: int = 0
    narrowed: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    failed_problems: int = 0
    pass_seconds: float = 0.0
    """That all passes took."""


@dataclass
class _Watched:
    """A history and when it is looked at next, by ``time.monotonic()``."""

    keeper: HistoryMaintainer
    figures: HistoryFigures
    due: float = 0.0
    failures: int = 0
    """Passes that failed one after the other."""


@dataclass
class ServiceState:
    """What the service shows; each attribute is replaced as a whole, so that other threads may read it."""

    histories: tuple[HistoryFigures, ...] = ()
    expired: int = 0
    """Histories that were removed as nobody used them."""
    redis_up: bool = False
    """Whether Redis answered last."""
    failure: str = "Redis was not asked yet"
    """Why it is not, in words for a person."""
    beat: float = field(default_factory=time.monotonic)
    """When the service last did anything, by ``time.monotonic()``."""


class HistoryService:
    """The loop of the service; it goes on whatever Redis and the histories do, until it is stopped."""

    def __init__(self, connect: Callable[[], Redis], *, token: str, retention: float | None = RETENTION_S) -> None:
        """Connect to nothing yet.

        Args:
            connect: makes the client; called again until it does.
            token: by which leases are known to be this process's.
            retention: seconds after which an unused history is removed; None: never.
        """
        self.state = ServiceState()
        self._connect = connect
        self._token = token
        self._retention = retention
        self._client: Redis | None = None
        self._watched: dict[str, _Watched] = {}
        self._said = float("-inf")
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Have :meth:`run` give all leases up and return, after the effect under way."""
        self._stopping.set()

    def run(self) -> None:
        """Look after all histories until stopped."""
        while not self._stopping.is_set():
            try:
                self._round()
                if not self.state.redis_up:
                    logger.info("Redis answers; %d histories are looked after.", len(self._watched))
                self.state.redis_up, self.state.failure = True, ""
            except Exception as error:  # whatever it is, the service must live
                self._note_failure(error)
            self.state.beat = time.monotonic()
            self._stopping.wait(min(PASS_EVERY_S, _TICK_S))
        self._resign()

    def _reconnect(self) -> Redis:
        """A new client after each failure: addresses may have changed in a failover."""
        client = self._connect()
        for watched in self._watched.values():
            watched.keeper = self._keeper(client, watched.keeper.keys)
        return client

    def _round(self) -> None:
        """Look after each history that is due.

        Raises:
            Exception: Redis does not answer, or does not say which histories there are.
        """
        if self._client is None:
            self._client = self._reconnect()
        self._watch(self._client)
        for name, watched in list(self._watched.items()):
            if self._stopping.is_set():
                return
            self.state.beat = time.monotonic()
            try:
                if time.monotonic() >= watched.due:
                    self._look_after(name, watched)
                elif watched.keeper.leading:
                    watched.figures.leading = watched.keeper.lead()
            except Exception as error:
                self._client.ping()  # else it is not this history that fails
                self._put_off(watched, error)

    def _watch(self, client: Redis) -> None:
        names = {keys.full_name: keys for keys in histories(client)}
        for name in self._watched.keys() - names.keys():
            self._watched.pop(name).keeper.resign()
        for name, keys in names.items():
            if name not in self._watched:
                self._watched[name] = _Watched(self._keeper(client, keys), HistoryFigures(name))
        self._show()

    def _keeper(self, client: Redis, keys: HistoryKeys) -> HistoryMaintainer:
        return HistoryMaintainer(client, keys, token=self._token, retention=self._retention, stopping=self._stopping)

    def _look_after(self, name: str, watched: _Watched) -> None:
        done = watched.keeper.run_once()
        watched.failures = 0
        watched.due = time.monotonic() + pause_after(done)
        figures = watched.figures
        figures.leading = watched.keeper.leading
        if done.plan is None:
            figures.last = None
            return
        figures.last = done
        figures.passes += 1
        figures.pass_seconds += done.seconds
        figures.compacted += done.compacted
        figures.empty += done.empty
        figures.trimmed += done.trimmed
        figures.narrowed += done.narrowed
        figures.evicted += done.evicted
        figures.evicted_bytes += done.evicted_bytes
        figures.failed_problems += done.failed
        if done.expired:
            watched.keeper.resign()
            self.state.expired += 1
            del self._watched[name]
        self._show()

    def _put_off(self, watched: _Watched, error: Exception) -> None:
        """Look at a history that fails ever more seldom; the others are not held up."""
        watched.failures += 1
        watched.figures.failed_passes += 1
        watched.figures.leading = False
        pause = min(_LONGEST_PAUSE_S, PASS_EVERY_S * 2.0**watched.failures)
        watched.due = time.monotonic() + pause
        logger.error(
            "History %s cannot be looked after; the next try is in %.0f s: %s: %s",
            watched.figures.history,
            pause,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, redis.RedisError),
        )

    def _note_failure(self, error: Exception) -> None:
        self.state.redis_up = False
        self.state.failure = f"{type(error).__name__}: {error}"
        for watched in self._watched.values():
            watched.figures.leading = watched.keeper.leading = False
        if self._client is not None:
            self._client.close()
            self._client = None
        if time.monotonic() - self._said > _SAY_EVERY_S:
            self._said = time.monotonic()
            known = isinstance(error, _AWAY)
            logger.warning(
                "Histories are not looked after: %s; trying again until Redis answers.",
                self.state.failure,
                exc_info=not known,
            )

    def _show(self) -> None:
        self.state.histories = tuple(watched.figures for watched in self._watched.values())

    def _resign(self) -> None:
        for watched in self._watched.values():
            if not watched.keeper.leading:
                continue
            try:
                watched.keeper.resign()
            except redis.RedisError as error:
                logger.info("The lease of history %s ends by itself: %s", watched.figures.history, error)
                if passes(error):
                    return
