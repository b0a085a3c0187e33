"""Reads heads' /status, each at most once in a while."""

from __future__ import annotations

import time

import aiohttp
from pydantic import ValidationError

from rollout_operator import names
from rollout_operator.head_status import HeadStatus
from rollout_operator.observed import PodView
from rollout_operator.plan import STATUS_PERIOD_S

_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_LARGEST = 8 << 20
_ASKED_AGAIN_AFTER_S = 2.0
"""Where there was no answer."""


class Heads:
    """What the heads of all jobs said last."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._said: dict[str, tuple[float, HeadStatus | None]] = {}
        """Uid of the pod → when it was asked, and what it said."""

    async def ask(self, head: PodView | None) -> HeadStatus | None:
        """What a head says now, or said within the last seconds; None if it does not answer."""
        if head is None or not head.ip or head.phase != "Running":
            return None
        asked, said = self._said.get(head.uid, (float("-inf"), None))
        now = time.monotonic()
        # a little less than the period, lest a look that comes a moment early wait for the next
        if now - asked < (_ASKED_AGAIN_AFTER_S if said is None else 0.9 * STATUS_PERIOD_S):
            return said
        said = await self._read(head.ip)
        self._said[head.uid] = (now, said)
        if len(self._said) > 64:
            self._said = {uid: one for uid, one in self._said.items() if now - one[0] < 10 * STATUS_PERIOD_S}
        return said

    async def _read(self, ip: str) -> HeadStatus | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(f"http://{host}:{names.HTTP_PORT}/status") as response:
                if response.status != 200:
                    return None
                return HeadStatus.model_validate_json(await response.content.read(_LARGEST))
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError):
            return None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
