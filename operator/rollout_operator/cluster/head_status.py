"""Reads the status of heads over HTTP, with a cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.status_token import StatusToken
from rollout_operator.objects import names
from rollout_operator.objects.observed import STARTING_PERIOD_S, STATUS_PERIOD_S, HeadStatus, PodView

_STATUS_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_MAX_STATUS_MIB = 4
"""Maximum size of a status. Heads of earlier versions send 2.2 kB per engine."""
_MAX_PROBLEM = 300
"""Maximum length of the text that says why a status cannot be used."""
_MAX_WAIT_S = 0.2
"""Time that a reconcile waits for a head's answer."""
_MAX_CONCURRENT_RETRIES = 64
"""Number of heads that did not answer and are asked again at the same time."""
_RETRY_AFTER_S = 2.0
"""Seconds after which a head that did not answer is asked again."""
_MAX_CACHED = 64
"""Number of cached statuses above which outdated ones are dropped."""


@dataclass
class _CachedStatus:
    asked_at: float
    """When the head was last asked, in seconds of the monotonic clock."""
    status: HeadStatus | None
    """Its answer; None if it did not answer, or if the answer cannot be used."""
    problem: str = ""
    """Why the answer cannot be used."""


class HeadStatusReader:
    """The last known status of the heads of all jobs.

    A head that does not answer must not delay the reconciles of other jobs. A reconcile therefore waits only briefly
    for an answer, and not at all for a head that did not answer the last time. An answer that arrives later causes
    another reconcile.
    """

    def __init__(self, token: StatusToken | None = None, *, lifetime_s: float = 0.9 * STATUS_PERIOD_S) -> None:
        """Create a reader without statuses.

        Args:
            token: the token that heads require; None if they require none.
            lifetime_s: seconds that a status is used. It is slightly shorter than the interval of a job's
                reconciles, so that one that runs a moment early still reads the status again.
        """
        self._lifetime_s, self._token = lifetime_s, token or StatusToken()
        self._session: aiohttp.ClientSession | None = None
        self._cache: dict[str, _CachedStatus] = {}
        """By uid of the head's pod."""
        self._reads: dict[str, asyncio.Task[None]] = {}
        """Reads in progress, by uid of the head's pod."""
        self._free_retries = asyncio.Semaphore(_MAX_CONCURRENT_RETRIES)

    async def read(self, head: PodView | None, on_late_answer: Callable[[], None]) -> HeadStatus | None:
        """Return the status of a head, at most a few seconds old.

        *on_late_answer* is called if the head answers after this method has returned.

        Returns:
            The status; None if there is no running head, if it has not answered yet, or if its answer cannot be used.
        """
        if head is None or not head.ip or head.phase != "Running":
            return None
        known = self._cache.get(head.uid)
        if head.uid not in self._reads and (known is None or self._is_outdated(known)):
            is_retry = known is not None and known.status is None
            self._reads[head.uid] = asyncio.create_task(self._refresh(head, is_retry=is_retry))
            if not is_retry:
                await asyncio.wait({self._reads[head.uid]}, timeout=_MAX_WAIT_S)
        if (read := self._reads.get(head.uid)) is not None:
            read.add_done_callback(lambda task: None if task.cancelled() else on_late_answer())
        known = self._cache.get(head.uid)
        return None if known is None else known.status

    def problem(self, head: PodView | None) -> str:
        """Return why the last answer of a head cannot be used; empty if it can, or if there was none."""
        known = None if head is None else self._cache.get(head.uid)
        return "" if known is None else known.problem

    def _is_outdated(self, known: _CachedStatus) -> bool:
        if known.status is None:
            lifetime = self._lifetime_s if known.problem else _RETRY_AFTER_S
        else:
            lifetime = self._lifetime_s if known.status.engines else min(self._lifetime_s, 0.9 * STARTING_PERIOD_S)
        return time.monotonic() - known.asked_at >= lifetime

    async def _refresh(self, head: PodView, *, is_retry: bool) -> None:
        try:
            async with self._free_retries if is_retry else nullcontext():
                asked_at = time.monotonic()
                try:
                    answer = _CachedStatus(asked_at, await self._fetch(head.ip))
                except ValueError as error:
                    answer = _CachedStatus(asked_at, None, _describe(error)[:_MAX_PROBLEM])
                self._cache[head.uid] = answer
        finally:
            del self._reads[head.uid]
        if len(self._cache) > _MAX_CACHED:
            oldest = time.monotonic() - 10 * STATUS_PERIOD_S
            self._cache = {uid: entry for uid, entry in self._cache.items() if entry.asked_at > oldest}

    async def _fetch(self, ip: str) -> HeadStatus | None:
        """Return the status of a head; None if it does not answer.

        Raises:
            ValueError: the answer cannot be used.
        """
        if self._session is None:
            # A compressed answer might be much larger than what is received.
            self._session = aiohttp.ClientSession(
                timeout=_STATUS_TIMEOUT,
                connector=aiohttp.TCPConnector(limit=0),
                headers={**self._token.headers(), "Accept-Encoding": "identity"},
                auto_decompress=False,
            )
        host = f"[{ip}]" if ":" in ip else ip
        body = bytearray()
        try:
            # A head of an earlier version ignores the query, and answers with its whole status.
            url = f"http://{host}:{names.HTTP_PORT}/status?engines=brief"
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status == 503:  # the coordinator is starting
                    return None
                if response.status != 200:
                    raise ValueError(f"the answer has the HTTP status {response.status}")
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_STATUS_MIB << 20:
                        raise ValueError(f"it is larger than {_MAX_STATUS_MIB} MiB")
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        return HeadStatus.model_validate_json(bytes(body))

    async def close(self) -> None:
        """Cancel reads in progress and close all connections."""
        await cancel_and_wait(*self._reads.values())
        if self._session is not None:
            await self._session.close()


def _describe(error: ValueError) -> str:
    """Return the first of the errors of a status."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(str(key)[:100] for key in first["loc"]), first["msg"])))
