"""The checksum of published files, which only the first engine of a job computes."""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path

from rollout_api.weights.checksum import checksum, weight_files
from rollout_worker.job.job_store.weight_checksums import WeightChecksumStore
from rollout_worker.job.limits import WEIGHT_CHECKSUM_POLL_INTERVAL_S


class SharedChecksums:
    """Computes checksums of directories, and takes those that another engine of the job has computed.

    Another engine has seen the same files if their directory, names, sizes, times of modification and inode numbers are
    the same. A checksum that is not the expected one is always computed here.
    """

    def __init__(self, store: WeightChecksumStore) -> None:
        self._store = store

    async def __call__(self, directory: Path, expected: str) -> str:
        """Return the checksum of the weights in *directory*.

        Args:
            directory: the directory.
            expected: the checksum with which the weights were published.

        Raises:
            OSError: there are no weights, or they cannot be read.
        """
        files = await asyncio.to_thread(_identify, directory)
        while True:
            known = await self._store.read(files)
            if known == expected:
                return known
            if known is not None:
                return await asyncio.to_thread(checksum, directory)
            if await self._store.claim(files):
                break
            await asyncio.sleep(WEIGHT_CHECKSUM_POLL_INTERVAL_S)
        try:
            found = await asyncio.to_thread(checksum, directory)
            if files == await asyncio.to_thread(_identify, directory):
                await self._store.record(files, found)
        finally:
            await self._store.release(files)
        return found


def _identify(directory: Path) -> str:
    """Return a text that is the same for other engines if they see the same files."""
    seen = [str(directory)]
    for path in weight_files(directory):
        stat = path.stat()
        seen.append(json.dumps([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino]))
    return blake2b("\n".join(seen).encode(), digest_size=16).hexdigest()
