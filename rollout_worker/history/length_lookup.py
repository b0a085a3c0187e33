"""Looks up how long the rollouts of problems are, for the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import redis

from rollout_api.length_stats import LengthStats
from rollout_worker.history.limits import LENGTH_LOOKUP_PAUSE_S, LENGTH_LOOKUP_TIMEOUT_S
from rollout_worker.history.store import HistoryStore

NO_LENGTH_STATS = LengthStats.from_lengths(())
"""Statistics of a problem of which nothing is known."""

logger = logging.getLogger(__name__)


class LengthLookup:
    """Looks up length statistics in one history, without ever delaying its caller for long."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._not_before = 0.0

    async def fetch(self, problem_ids: Iterable[str]) -> dict[str, LengthStats]:
        """Return length statistics by problem id; empty ones if nothing is known or the history does not answer."""
        distinct = list(dict.fromkeys(problem_ids))
        unknown = dict.fromkeys(distinct, NO_LENGTH_STATS)
        if time.monotonic() < self._not_before:
            return unknown
        try:
            lookup = asyncio.to_thread(self._store.statistics.length_stats_by_problem, distinct)
            return await asyncio.wait_for(lookup, LENGTH_LOOKUP_TIMEOUT_S)
        except (redis.RedisError, TimeoutError) as error:
            self._not_before = time.monotonic() + LENGTH_LOOKUP_PAUSE_S
            logger.warning(
                "History %s does not return length statistics (%s: %s); requests are scheduled in order of arrival.",
                self._store.keys.full_name,
                type(error).__name__,
                error,
            )
            return unknown
