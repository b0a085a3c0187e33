"""All keys of a job in batches, so that a job with many keys neither takes much memory nor blocks Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import redis
import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_store.job.limits import JOB_RETENTION_S, KEYS_PER_SCAN


def key_batches(client: redis.Redis, keys: MessageKeys) -> Iterator[list[bytes]]:
    """Yield all keys of a job. A key that appears or is deleted meanwhile may or may not be among them."""
    found = client.scan_iter(keys.pattern(), count=KEYS_PER_SCAN)
    while batch := list(islice(found, KEYS_PER_SCAN)):
        yield batch


async def async_key_batches(client: redis.asyncio.Redis, keys: MessageKeys) -> AsyncIterator[list[bytes]]:
    """Yield the same as :func:`key_batches`, for an asyncio client."""
    batch: list[bytes] = []
    async for key in client.scan_iter(keys.pattern(), count=KEYS_PER_SCAN):
        batch.append(key)
        if len(batch) == KEYS_PER_SCAN:
            yield batch
            batch = []
    if batch:
        yield batch


def add_expiry(pipeline: Any, keys: Iterable[bytes]) -> None:
    """Add commands to *pipeline*, synchronous or not, that let *keys* expire after :data:`JOB_RETENTION_S`."""
    for key in keys:
        pipeline.expire(key, JOB_RETENTION_S, lt=True)  # keys that expire earlier, such as leases, still do
