"""How long the rollouts of a problem were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import redis.asyncio

from rollout_api.keys import HistoryKeys
from rollout_worker.history.connection import async_server_function, patiently

_AT_ONCE = 64
"""Problems that are asked for together: a history keeps a thousand rollouts of each, and others wait meanwhile."""


class MeanLengths:
    """Mean lengths of problems' rollouts in one history."""

    def __init__(self, client: redis.asyncio.Redis, keys: HistoryKeys) -> None:
        self._client, self._keys = client, keys
        self._mean = async_server_function(client, __package__, "mean_length")

    async def of(self, problems: Iterable[str]) -> dict[str, float]:
        """Problem → mean length in tokens; 0 if it has no rollouts. Waits for a Redis that is away."""
        distinct = list(dict.fromkeys(problems))
        found: dict[str, float] = {}
        for at in range(0, len(distinct), _AT_ONCE):
            some = distinct[at : at + _AT_ONCE]
            found |= zip(some, await patiently(self._ask, some), strict=True)
        return found

    async def _ask(self, problems: Sequence[str]) -> list[float]:
        # anew for each try: redis-py empties a pipeline that has failed
        pipeline = self._client.pipeline(transaction=False)
        for problem in problems:
            await self._mean(keys=[self._keys.lengths(problem)], client=pipeline)
        return [float(mean) for mean in await pipeline.execute()]
