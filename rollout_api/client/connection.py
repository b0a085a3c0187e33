"""What all clients of a job have in common: how they find the job, and their life from opening to closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from typing_extensions import Self

from rollout_api.errors import InvalidRequestError, RolloutClientError
from rollout_api.redis_client.client_connection import RedisTarget, open_client, server_name
from rollout_api.redis_client.retry import ClientRetryPolicy

CLOSED = "the client is closed; connect another one"
"""Error of calls to a client that was closed."""
_NOT_CONNECTED = "the client is not connected yet: use it in 'async with', or await client.open()"


class JobConnection(ABC):
    """A connection to the Redis server of a job that is named by *job* or by *uid*.

    Args:
        target: URL of the server, or a client whose settings are copied.
        job: ``namespace/name`` of the job.
        uid: uid of the job, instead of *job*.
        timeout: seconds to wait for the job to appear.
        reconnect_timeout: seconds for which Redis may be unreachable.

    Raises:
        InvalidRequestError: an argument cannot be used.
    """

    def __init__(
        self, target: RedisTarget, job: str | None, uid: str | None, timeout: float, reconnect_timeout: float
    ) -> None:
        if (job is None) == (uid is None):
            raise InvalidRequestError("pass either the name of the job ('namespace/name') or its uid, but not both")
        self._job_name = None if job is None else (job if "/" in job else f"default/{job}")
        self._uid, self._timeout = uid, timeout
        self._redis = open_client(target)
        self._policy = ClientRetryPolicy(server_name(self._redis), reconnect_timeout)
        self._is_closed = False

    @abstractmethod
    async def open(self) -> Self:
        """Connect to the job."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect from the job."""

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _check_not_closed(self) -> None:
        """Raise an error if the client was closed."""
        if self._is_closed:
            raise RolloutClientError(CLOSED)

    def _not_connected(self) -> RolloutClientError:
        """Return the error of calls to a client that is not connected, because it is closed or not open yet."""
        return RolloutClientError(CLOSED if self._is_closed else _NOT_CONNECTED)
