"""Looks up how long the rollouts of problems are, for the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable

import redis

from rollout_api.length_stats import LengthStats
from rollout_worker.history.store import HistoryStore

LENGTH_LOOKUP_TIMEOUT_S = 1.0
"""Seconds to wait for length statistics; all requests of a job wait for them."""
LENGTH_LOOKUP_RETENTION_S = 5.0
"""Seconds for which statistics that were looked up are used again."""
LENGTH_LOOKUP_PAUSE_S = 30.0
"""Seconds without a lookup after one has failed."""

NO_LENGTH_STATS = LengthStats.from_lengths(())
"""Statistics of a problem of which nothing is known."""

logger = logging.getLogger(__name__)


class LengthLookup:
    """Looks up length statistics in one history, without ever delaying its caller for long.

    Statistics are kept for a few seconds, because the turns of many trajectories ask for those of the same problems.
    """

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._not_before = 0.0
        self._known: OrderedDict[str, tuple[float, LengthStats]] = OrderedDict()
        """Problem id → ``time.monotonic()`` of the lookup, and the statistics; oldest first."""

    async def fetch(self, problem_ids: Iterable[str]) -> dict[str, LengthStats]:
        """Return length statistics by problem id; empty ones if nothing is known or the history does not answer."""
        distinct = list(dict.fromkeys(problem_ids))
        now = time.monotonic()
        while self._known and next(iter(self._known.values()))[0] < now - LENGTH_LOOKUP_RETENTION_S:
            self._known.popitem(last=False)
        known = {problem: self._known[problem][1] for problem in distinct if problem in self._known}
        missing = [problem for problem in distinct if problem not in known]
        return known | (await self._look_up(missing) if missing else {})

    async def _look_up(self, problem_ids: list[str]) -> dict[str, LengthStats]:
        unknown = dict.fromkeys(problem_ids, NO_LENGTH_STATS)
        if time.monotonic() < self._not_before:
            return unknown
        try:
            lookup = asyncio.to_thread(self._store.statistics.length_stats_by_problem, problem_ids)
            found = await asyncio.wait_for(lookup, LENGTH_LOOKUP_TIMEOUT_S)
        except (redis.RedisError, TimeoutError) as error:
            self._not_before = time.monotonic() + LENGTH_LOOKUP_PAUSE_S
            logger.warning(
                "History %s does not return length statistics (%s: %s); requests are scheduled in order of arrival.",
                self._store.keys.full_name,
                type(error).__name__,
                error,
            )
            return unknown
        now = time.monotonic()
        for problem, stats in found.items():
            self._known[problem] = now, stats
            self._known.move_to_end(problem)
        return found
