"""The requests whose samples this engine produces."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import RolloutRequest, decode
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.limits import MAX_CACHED_REQUESTS


class RequestCache:
    """Reads each request once for all its samples; recently used requests are kept."""

    def __init__(self, job_store: JobStore, defaults: Sampling) -> None:
        """Create an empty cache.

        Args:
            job_store: the job's state in Redis.
            defaults: sampling settings of the job, for what a request leaves open.
        """
        self._job_store, self._defaults = job_store, defaults
        self._reads: OrderedDict[str, asyncio.Future[RolloutRequest | None]] = OrderedDict()

    async def get(self, entry: str) -> RolloutRequest | None:
        """Return the request in an entry of the request stream; None once it has been answered."""
        read = self._reads.get(entry)
        if read is None:
            read = asyncio.ensure_future(self._read(entry))
            self._keep(entry, read)
        else:
            self._reads.move_to_end(entry)
        return read.result() if read.done() else await asyncio.shield(read)

    def add(self, entry: str, encoded: bytes) -> None:
        """Keep a request that has arrived with an order."""
        request = decode(encoded)
        if isinstance(request, RolloutRequest) and entry not in self._reads:
            known: asyncio.Future[RolloutRequest | None] = asyncio.get_running_loop().create_future()
            known.set_result(request.with_defaults(self._defaults))
            self._keep(entry, known)

    def _keep(self, entry: str, read: asyncio.Future[RolloutRequest | None]) -> None:
        self._reads[entry] = read
        while len(self._reads) > MAX_CACHED_REQUESTS:
            self._reads.popitem(last=False)

    async def _read(self, entry: str) -> RolloutRequest | None:
        request = await self._job_store.requests.read(entry)
        return request.with_defaults(self._defaults) if request is not None else None
