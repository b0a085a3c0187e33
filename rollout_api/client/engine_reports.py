"""Reads what the engines of a job report."""

from __future__ import annotations

from typing import Any

import msgpack
import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import ClientRetryPolicy


async def read_engine_reports(
    client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy
) -> dict[str, dict[str, Any]]:
    """Return the reports of the engines that are alive and not being drained, by engine id.

    Raises:
        RolloutClientError: Redis cannot be read.
    """

    async def read() -> dict[str, dict[str, Any]]:
        stored: Any = await client.hgetall(keys.engines)
        engines = [engine.decode() for engine in stored]
        leases = await client.mget([keys.lease(engine) for engine in engines]) if engines else []
        reports = [msgpack.unpackb(report, strict_map_key=False) for report in stored.values()]
        return {
            engine: report
            for engine, report, lease in zip(engines, reports, leases, strict=True)
            if lease is not None and not report.get("draining")
        }

    return await policy.run(read, action="read the state of the engines")
