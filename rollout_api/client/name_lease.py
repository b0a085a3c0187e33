"""The lease on a client's name, which keeps two processes from reading the same result stream."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from typing import Any

import redis
import redis.asyncio

from rollout_api.client.limits import ClientLimits
from rollout_api.errors import NameInUseError
from rollout_api.protocol.keys import CLIENT_LEASE_MS
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import execute_even_when_full

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.25
"""Pause while another process holds the client's name."""


def default_name() -> str:
    """Return the name of a client that is given none: ``trainer``, or ``trainer-N`` in rank N > 0 of a trainer."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return "trainer" if rank == "0" else f"trainer-{rank}"


class NameLease:
    """A key with an expiry time that reserves a client's name for this process.

    Args:
        client: connection to Redis.
        key: key of the lease.
        name: the client's name.
        job_name: the job's name, for messages.
        policy: how failing commands are retried.
        limits: intervals of the client.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        key: str,
        name: str,
        job_name: str,
        policy: ClientRetryPolicy,
        limits: ClientLimits,
    ) -> None:
        self.key = key
        """Key of the lease."""
        self._client, self._name, self._job_name = client, name, job_name
        self._policy, self._limits = policy, limits
        self._token = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"

    async def acquire(self) -> None:
        """Take the lease. If another process holds it, wait for some seconds: a killed process's lease expires.

        Raises:
            NameInUseError: another process keeps renewing it.
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: Redis refuses this client.
        """
        deadline = time.monotonic() + self._limits.name_timeout_s
        logged = False
        while not await self._policy.run(self._try_acquire, action="register the client"):
            holder: Any = await self._policy.run(lambda: self._client.get(self.key), action="register the client")
            if time.monotonic() > deadline:
                raise self.in_use_error(holder)
            if not logged and holder is not None:
                logged = True
                logger.info("Client name %s is held by %s; waiting for its release.", self._name, holder.decode())
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def renew(self, holder: bytes | None) -> None:
        """Extend the lease if this process holds it, or take it again if it has expired.

        Args:
            holder: value of the lease's key.

        Raises:
            redis.RedisError: Redis failed.
        """
        if holder is None:
            await self._try_acquire()
        elif self.is_held_by_this_process(holder):
            await self._client.pexpire(self.key, CLIENT_LEASE_MS)

    async def release(self) -> None:
        """Delete the lease if this process holds it. If Redis fails, the lease expires by itself."""
        try:
            holder: Any = await self._client.get(self.key)
            if holder is not None and self.is_held_by_this_process(holder):
                await self._client.delete(self.key)
        except redis.RedisError:
            pass

    def is_held_by_this_process(self, holder: bytes) -> bool:
        """Return whether *holder*, the value of the lease's key, identifies this process."""
        return holder == self._token.encode()

    def in_use_error(self, holder: bytes | None) -> NameInUseError:
        """Return the error that says which process holds the name."""
        process = f" (host/process {holder.decode().rpartition('/')[0]})" if holder else ""
        return NameInUseError(
            f"another process is connected to job {self._job_name} as {self._name!r}{process}, and two clients with "
            "one name would take each other's results; give each trainer rank its own name"
        )

    async def _try_acquire(self) -> bool:
        """Take the lease if nobody holds it; return whether that succeeded."""
        command = ("SET", self.key, self._token, "PX", CLIENT_LEASE_MS, "NX")
        return bool(await execute_even_when_full(self._client, self.key, *command))
