"""Images of prompts in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollout_api.client.job_channel import JobChannel
from rollout_api.errors import JobFullError
from rollout_api.protocol.keys import IMAGE_RETENTION_S
from rollout_api.redis_client.server_functions import Call, Function, run_async

IMAGE_REFRESH_S = IMAGE_RETENTION_S / 12
"""Time after which clients store the images of their open requests again, which keeps them for longer."""
_IDLE_S = int(2 * IMAGE_REFRESH_S)
"""Time after which an image that nobody has needed makes room for others, so that no connected client needs it."""
MAX_STORED_REQUESTS = 64
"""All images of a job together may have this many times the bytes that those of one request may have."""
_OVERHEAD_BYTES = 512
"""Bytes that an image takes in Redis in addition to its own."""
_MAX_EXAMINED = 1000
"""Number of images that are examined at a time in search of room for another one."""
_STORE = Function("store_image")


class StoredImages:
    """Stores and reads images by their hashes.

    Args:
        channel: channel to the job.
    """

    def __init__(self, channel: JobChannel) -> None:
        self._redis, self._keys, self._policy = channel.redis, channel.keys, channel.policy
        self._job = channel.job

    @property
    def _max_bytes(self) -> int:
        """Maximum number of bytes of all images of the job."""
        return MAX_STORED_REQUESTS * self._job.max_image_bytes

    async def store(self, images: Mapping[str, bytes]) -> frozenset[str]:
        """Store the images that Redis does not have, and keep those that it has for longer.

        Args:
            images: hash → image.

        Returns:
            The hashes of images that the job has no room for: the first one, and those after it that Redis lacks.

        Raises:
            RolloutClientError: Redis cannot be reached, or refuses the images.
        """

        async def keep_for_longer() -> list[str]:
            pipeline = self._redis.pipeline(transaction=False)
            for digest in images:
                pipeline.expire(self._keys.image(digest), IMAGE_RETENTION_S)
            return [digest for digest, is_there in zip(images, await pipeline.execute(), strict=True) if not is_there]

        if not images:
            return frozenset()
        missing = await self._policy.run(keep_for_longer, action="store images")
        for index, digest in enumerate(missing):
            limits = [IMAGE_RETENTION_S, _IDLE_S, self._max_bytes, _OVERHEAD_BYTES, _MAX_EXAMINED]
            call = Call(
                _STORE,
                [self._keys.image(digest), self._keys.images, self._keys.image_bytes],
                [digest, images[digest], self._keys.image(""), *limits],
            )
            if not await self._policy.run(partial(run_async, self._redis, call), action="store images"):
                return frozenset(missing[index:])
        return frozenset()

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

    def no_room(self) -> JobFullError:
        """Return the error of a request for whose images :meth:`store` finds no room."""
        return JobFullError(
            f"the job has as many images as it may have ({self._max_bytes} bytes, {MAX_STORED_REQUESTS} times "
            "spec.queue.maxImageBytes); raise the limit, or try again later, when some are not needed any more"
        )
