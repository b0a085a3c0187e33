"""Images of prompts in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollout_api.client.job_channel import JobChannel
from rollout_api.protocol.keys import IMAGE_RETENTION_S


class StoredImages:
    """Stores and reads images by their hashes.

    Args:
        channel: channel to the job.
    """

    def __init__(self, channel: JobChannel) -> None:
        self._redis, self._keys, self._policy = channel.redis, channel.keys, channel.policy

    async def store(self, images: Mapping[str, bytes]) -> None:
        """Store the images that Redis does not have, and keep those that it has for longer.

        Args:
            images: hash → image.

        Raises:
            RolloutClientError: Redis cannot be reached, or refuses the images.
        """

        async def keep_for_longer() -> list[str]:
            pipeline = self._redis.pipeline(transaction=False)
            for digest in images:
                pipeline.expire(self._keys.image(digest), IMAGE_RETENTION_S)
            return [digest for digest, is_there in zip(images, await pipeline.execute(), strict=True) if not is_there]

        if not images:
            return
        for digest in await self._policy.run(keep_for_longer, action="store images"):
            store = partial(self._redis.set, self._keys.image(digest), images[digest], ex=IMAGE_RETENTION_S)
            await self._policy.run(store, action="store images")

    async def read(self, hashes: Sequence[str]) -> list[bytes | None]:
        """Return the images with these hashes; None for those that are not there.

        Raises:
            RolloutClientError: Redis cannot be reached.
        """
        if not hashes:
            return []
        keys = [self._keys.image(digest) for digest in hashes]
        images: Any = await self._policy.run(lambda: self._redis.mget(keys), action="read images")
        return list(images)
