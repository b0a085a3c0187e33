"""The parts of a job's state in Redis."""

from __future__ import annotations

import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect_async
from rollout_api.redis_client.retry import RetryPolicy
from rollout_store.job.assignments import AssignmentStore
from rollout_store.job.engines import EngineRegistry
from rollout_store.job.job_record import JobRecord, SharedChecksums
from rollout_store.job.part import StorePart
from rollout_store.job.requests import RequestStore, ResultStore
from rollout_store.job.rollouts import RolloutStore
from rollout_store.job.streams import IncomingStreams
from rollout_store.job.timeline import TimelineStore

MAX_BLOCKING_READ_S = 1.0
"""Maximum seconds that a read of a stream waits in Redis for new entries."""


class JobStore(StorePart):
    """The state of one job in Redis. Each attribute stores one part of it."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, retries: RetryPolicy | None = None) -> None:
        super().__init__(client, keys, retries)
        self.keys = keys
        self.job = JobRecord(client, keys, retries)
        self.incoming = IncomingStreams(client, keys, retries)
        self.requests = RequestStore(client, keys, retries)
        self.rollouts = RolloutStore(client, keys, retries)
        self.results = ResultStore(client, keys, retries)
        self.timeline = TimelineStore(client, keys, retries)
        self.assignments = AssignmentStore(client, keys, retries)
        self.engines = EngineRegistry(client, keys, retries)
        self.weight_checksums = SharedChecksums(client, keys)
        self.once = self if retries is None else JobStore(client, keys)
        """The same state, whose methods raise an error at once if Redis is unreachable or full."""

    @classmethod
    def connect(cls, url: str, keys: MessageKeys) -> JobStore:
        """Open the state of a job for the caller's asyncio event loop."""
        return cls(connect_async(url, block=MAX_BLOCKING_READ_S), keys, RetryPolicy())

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def server_run_id(self) -> str:
        """Return the id of the server's process, which changes with a restart or a failover.

        Raises:
            redis.ResponseError: the server does not tell its id.
        """
        # redis-py parses only the replies to commands whose name is a string; of this one, it would parse all lines.
        info: bytes = await self._client.execute_command(b"INFO", "server")
        if not (run_id := info.partition(b"run_id:")[2].partition(b"\r")[0]):
            raise redis.ResponseError(
                "the reply to INFO server has no run_id, by which restarts of Redis are noticed; connect to the server "
                "itself instead of a proxy that leaves it out"
            )
        return run_id.decode()

    async def clock(self) -> float:
        """Return the Unix time of the server. Deadlines are counted by this clock."""
        seconds, micros = await self._client.time()
        return float(seconds) + micros / 1e6
