"""How long a problem's rollouts are expected to be, for whoever decides which goes first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import redis

from rollout_api.length_stats import LengthStats
from rollout_worker.history.store import HistoryStore

NOTHING_KNOWN = LengthStats.of(())

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""For an answer: all requests of a job wait meanwhile."""
_PAUSE_S = 30.0
"""After a failure, until the history is asked again."""


class ExpectedLengths:
    """Length statistics of problems' rollouts in one history."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._not_before = 0.0

    async def of(self, problems: Iterable[str]) -> dict[str, LengthStats]:
        """Problem → its lengths; empty if nothing is known of it, or the history does not answer."""
        distinct = list(dict.fromkeys(problems))
        unknown = dict.fromkeys(distinct, NOTHING_KNOWN)
        if time.monotonic() < self._not_before:
            return unknown
        try:
            asking = asyncio.to_thread(self._store.length_stats_of, distinct)
            return await asyncio.wait_for(asking, _WAIT_S)
        except (redis.RedisError, TimeoutError) as error:
            self._not_before = time.monotonic() + _PAUSE_S
            logger.warning(
                "The history does not tell how long rollouts are (%s: %s); they are taken in the order in which they "
                "came.",
                type(error).__name__,
                error,
            )
            return unknown
