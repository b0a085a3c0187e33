"""A client's channel to one job: the job's keys in Redis, and messages to its streams, with retries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgpack
import redis.asyncio

from rollout_api.client.job_info import JobInfo
from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, encode
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import execute_even_when_full

IDS_PER_MESSAGE = 1000
"""Request ids in one cancellation, and rollout ids in one report of rewards."""


class JobChannel:
    """What all parts of a client need in order to reach its job.

    A message whose reply was lost is sent again. That is harmless: the job recognizes a repeated request by its id, and
    every other message is idempotent. After too long an outage, a :class:`rollout_api.RedisUnreachableError` is raised,
    and some messages may have arrived; if Redis refuses a command, a :class:`rollout_api.RedisRefusedError` is.

    Args:
        redis: connection to Redis.
        policy: how failing commands are retried.
        job: the job.
        client_name: name of the client.
    """

    def __init__(self, redis: redis.asyncio.Redis, policy: ClientRetryPolicy, job: JobInfo, client_name: str) -> None:
        self.redis, self.policy, self.job, self.client_name = redis, policy, job, client_name
        self.keys = MessageKeys(job.uid)
        """Keys of the job."""

    async def append(self, stream: str, messages: Sequence[bytes], action: str) -> list[str]:
        """Append messages to a stream and return the ids of their entries.

        Args:
            stream: key of the stream.
            messages: encoded messages.
            action: what the messages do, for errors.
        """
        ids: dict[int, str] = {}

        async def append_missing() -> None:
            missing = [index for index in range(len(messages)) if index not in ids]
            pipeline = self.redis.pipeline(transaction=False)
            for index in missing:
                pipeline.xadd(stream, {MESSAGE_FIELD: messages[index]})
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            ids.update(
                (index, reply.decode())
                for index, reply in zip(missing, replies, strict=True)
                if isinstance(reply, bytes)
            )
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply

        await self.policy.run(append_missing, action=action)
        return [ids[index] for index in range(len(messages))]

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ask the job to cancel requests. This works while Redis is full, because it helps to free memory."""
        control = self.keys.control
        for start in range(0, len(request_ids), IDS_PER_MESSAGE):
            message = encode(Cancel(request_ids=list(request_ids[start : start + IDS_PER_MESSAGE])))
            append = partial(execute_even_when_full, self.redis, control, "XADD", control, "*", MESSAGE_FIELD, message)
            await self.policy.run(append, action="cancel requests")

    async def is_processed(self, entry_id: str, action: str) -> bool:
        """Return whether the job has processed, and thus deleted, an entry of its control stream; or Redis lost it.

        Args:
            entry_id: id of the entry.
            action: what the caller does, for errors.
        """
        control = self.keys.control
        return not await self.policy.run(lambda: self.redis.xrange(control, min=entry_id, max=entry_id), action=action)

    async def engine_reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of the engines that are alive and not being drained, by engine id."""

        async def read() -> dict[str, dict[str, Any]]:
            stored: Any = await self.redis.hgetall(self.keys.engines)
            engines = [engine.decode() for engine in stored]
            leases = await self.redis.mget([self.keys.lease(engine) for engine in engines]) if engines else []
            reports = [msgpack.unpackb(report, strict_map_key=False) for report in stored.values()]
            return {
                engine: report
                for engine, report, lease in zip(engines, reports, leases, strict=True)
                if lease is not None and not report.get("draining")
            }

        return await self.policy.run(read, action="read the state of the engines")
