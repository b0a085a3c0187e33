"""Checksums of published weights, which one engine computes for all."""

from __future__ import annotations

from rollout_worker.job.job_store.part import StorePart, as_text
from rollout_worker.job.limits import WEIGHT_CHECKSUM_CLAIM_S, WEIGHT_CHECKSUM_EXPIRY_S


class WeightChecksumStore(StorePart):
    """Keeps the checksums of files, which are identified by a text, until they expire."""

    async def read(self, files: str) -> str | None:
        """Return the checksum of *files*; None if it was not computed."""
        found = await self._client.get(self._keys.weight_checksum(files))
        return None if found is None else as_text(found)

    async def claim(self, files: str) -> bool:
        """Return whether the caller should compute the checksum of *files*, because no other engine does."""
        claimed = await self._client.set(
            self._keys.weight_checksum_claim(files), "1", nx=True, ex=WEIGHT_CHECKSUM_CLAIM_S
        )
        return bool(claimed)

    async def release(self, files: str) -> None:
        """End a claim without a checksum."""
        await self._client.delete(self._keys.weight_checksum_claim(files))

    async def record(self, files: str, checksum: str) -> None:
        """Record the checksum of *files*."""
        await self._client.set(self._keys.weight_checksum(files), checksum, ex=WEIGHT_CHECKSUM_EXPIRY_S)
