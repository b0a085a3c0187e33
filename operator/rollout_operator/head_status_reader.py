"""Reads the ``/status`` of heads, with a cache."""

from __future__ import annotations

import time

import aiohttp
from pydantic import ValidationError

from rollout_operator import names
from rollout_operator.head_status import STATUS_PERIOD_S, HeadStatus
from rollout_operator.observed import PodView

_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_MAX_RESPONSE_BYTES = 8 << 20
_RETRY_AFTER_S = 2.0
"""Seconds after which a head that did not answer is asked again."""
_MAX_CACHED = 64
"""Number of cached statuses above which outdated ones are dropped."""


class HeadStatusReader:
    """The last known status of the heads of all jobs."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._cache: dict[str, tuple[float, HeadStatus | None]] = {}
        """Uid of the head pod → when it was asked, and its status or None if it did not answer."""

    async def read(self, head: PodView | None) -> HeadStatus | None:
        """Return the status of a head, at most a few seconds old; None if the head does not answer."""
        if head is None or not head.ip or head.phase != "Running":
            return None
        read_at, status = self._cache.get(head.uid, (float("-inf"), None))
        now = time.monotonic()
        # Expire slightly early, so that a reconcile that runs a moment early still refreshes.
        if now - read_at < (_RETRY_AFTER_S if status is None else 0.9 * STATUS_PERIOD_S):
            return status
        status = await self._fetch(head.ip)
        self._cache[head.uid] = (now, status)
        if len(self._cache) > _MAX_CACHED:
            self._cache = {uid: entry for uid, entry in self._cache.items() if now - entry[0] < 10 * STATUS_PERIOD_S}
        return status

    async def _fetch(self, ip: str) -> HeadStatus | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(f"http://{host}:{names.HTTP_PORT}/status") as response:
                if response.status != 200:
                    return None
                return HeadStatus.model_validate_json(await response.content.read(_MAX_RESPONSE_BYTES))
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError):
            return None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
