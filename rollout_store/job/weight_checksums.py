"""Checksums of published directories, each of which only the first engine of a job computes."""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path

import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import retry_async
from rollout_api.weights.checksum import checksum, weight_files
from rollout_store.job.limits import (
    WEIGHT_CHECKSUM_CLAIM_S,
    WEIGHT_CHECKSUM_EXPIRY_S,
    WEIGHT_CHECKSUM_POLL_INTERVAL_S,
)
from rollout_store.job.part import as_text


class SharedChecksums:
    """Computes checksums of directories, and takes those that another engine of the job has computed.

    Another engine has seen the same files if their directory, names, sizes, times of modification and inode numbers are
    the same. A checksum that is not the expected one is always computed here.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    async def __call__(self, directory: Path, expected: str) -> str:
        """Return the checksum of the weights in *directory*.

        Args:
            directory: the directory.
            expected: the checksum with which the weights were published.

        Raises:
            OSError: there are no weights, or they cannot be read.
        """
        files = await asyncio.to_thread(_identify, directory)
        claim = self._keys.weight_checksum_claim(files)
        while True:
            known = await retry_async(self._client.get, self._keys.weight_checksum(files))
            if known is not None:
                known = as_text(known)
                return known if known == expected else await asyncio.to_thread(checksum, directory)
            if await retry_async(lambda: self._client.set(claim, "1", nx=True, ex=WEIGHT_CHECKSUM_CLAIM_S)):
                break
            await asyncio.sleep(WEIGHT_CHECKSUM_POLL_INTERVAL_S)
        try:
            found = await asyncio.to_thread(checksum, directory)
            if files == await asyncio.to_thread(_identify, directory):
                key = self._keys.weight_checksum(files)
                await retry_async(lambda: self._client.set(key, found, ex=WEIGHT_CHECKSUM_EXPIRY_S))
        finally:
            await retry_async(self._client.delete, claim)
        return found


def _identify(directory: Path) -> str:
    """Return a text that is the same for other engines if they see the same files."""
    seen = [str(directory)]
    for path in weight_files(directory):
        stat = path.stat()
        seen.append(json.dumps([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino]))
    return blake2b("\n".join(seen).encode(), digest_size=16).hexdigest()
