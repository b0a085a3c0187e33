"""The common part of all clients of a job: finding the job, and their life from opening to closing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType

from typing_extensions import Self

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.job_channel import JobChannel
from rollout_api.client.job_info import JobInfo, find_job
from rollout_api.client.job_state import JobMonitor, JobPauser
from rollout_api.client.open_request import Leftovers
from rollout_api.client.results import Results
from rollout_api.client.weight_publisher import WeightPublisher
from rollout_api.client.weight_transfer import TransferPublisher
from rollout_api.errors import InvalidRequestError, JobEndedError, RolloutClientError
from rollout_api.protocol.status import NO_STATUS, CoordinatorStatus
from rollout_api.redis_client.client_connection import RedisTarget, open_client, server_name
from rollout_api.redis_client.retry import ClientRetryPolicy

CLOSED = "the client is closed; connect another one"
"""Error of calls to a client that was closed."""
_NOT_CONNECTED = "the client is not connected yet: use it in 'async with', or await client.open()"


class JobSession:
    """What a client uses while it is connected to a job.

    Args:
        channel: channel to the job.
        job_name: ``namespace/name`` that the client found the job by; None if it was given the uid.
        leftovers: receives the requests with results that no step awaits; None if the results expire.
    """

    def __init__(self, channel: JobChannel, job_name: str | None, leftovers: Leftovers | None = None) -> None:
        self.channel = channel
        self.results = Results(channel, leftovers)
        self.publisher = WeightPublisher(channel)
        self.transfer = TransferPublisher(channel, self.publisher)
        self.pauser = JobPauser(channel)
        self.monitor = JobMonitor(channel, job_name, self.results)
        self._monitoring: asyncio.Task[None] | None = None

    async def open(self, ending: JobEndedError | None) -> None:
        """Begin to send requests, to receive results and to watch the job, which may have ended already."""
        self.results.observe(None, ending)
        await self.results.open()
        name = f"monitor of job {self.channel.job.name}"
        self._monitoring = asyncio.create_task(self.monitor.run(), name=name)

    async def close(self) -> None:
        """End all of this; whoever waits for results gets an error."""
        if self._monitoring is not None:
            await cancel_and_wait(self._monitoring)
        await self.results.close(RolloutClientError(CLOSED))


class JobConnection(ABC):
    """A connection to the Redis server of a job that is named by *job* or by *uid*.

    The arguments are those of :meth:`rollout_api.AsyncRolloutClient.connect`.
    """

    def __init__(
        self, target: RedisTarget, job: str | None, uid: str | None, name: str, timeout: float, reconnect_timeout: float
    ) -> None:
        if (job is None) == (uid is None):
            raise InvalidRequestError("pass either the name of the job ('namespace/name') or its uid, but not both")
        self.name = name
        """Name of this client."""
        self._job_name = None if job is None else (job if "/" in job else f"default/{job}")
        self._uid, self._timeout = uid, timeout
        self._redis = open_client(target)
        self._policy = ClientRetryPolicy(server_name(self._redis), reconnect_timeout)
        self._session: JobSession | None = None
        self._is_closed = False

    async def open(self) -> Self:
        """Wait for the job and read its description. ``async with`` does this on entry.

        Raises:
            JobNotFoundError: the job did not appear in time.
            JobEndedError: the job has ended, and no other job with its name appeared in time.
            VersionMismatchError: the job uses another version of the protocol.
            RedisUnreachableError: Redis did not answer for half a minute, or for *reconnect_timeout*.
            RedisRefusedError: the password is wrong, or the user lacks permissions.
        """
        if self._is_closed:
            raise RolloutClientError(CLOSED)
        try:
            job, ending = await find_job(self._redis, self._policy, self.name, self._job_name, self._uid, self._timeout)
            session = self._make_session(JobChannel(self._redis, self._policy, job, self.name), ending)
            await session.open(ending)
        except BaseException:
            await self._disconnect()
            raise
        self._session = session
        return self

    @abstractmethod
    def _make_session(self, channel: JobChannel, ending: JobEndedError | None) -> JobSession:
        """Return the session with a job, which may have ended already."""

    async def close(self) -> None:
        """Disconnect. Requests stay in the job; calls that wait for their rollouts fail."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Close the connections to Redis."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _connected(self) -> JobSession:
        if self._session is None:
            raise RolloutClientError(CLOSED if self._is_closed else _NOT_CONNECTED)
        return self._session

    @property
    def job(self) -> JobInfo:
        """Description of the job.

        Raises:
            RolloutClientError: the client is not connected yet.
        """
        return self._connected.channel.job

    @property
    def status(self) -> CoordinatorStatus:
        """Status of the job, about a second old; empty while no coordinator runs.

        A job of another version may lack some of its keys, which are therefore best read with ``get``.
        """
        status = None if self._session is None else self._session.monitor.status
        return status or NO_STATUS
