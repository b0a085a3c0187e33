"""Images of prompts, decoded as vLLM's own server does."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_store.job.admission_rules import AdmissionError

MAX_CACHED_BYTES = 2**28
"""Size in memory of the recently used images that an engine keeps."""


def decode_image(data: bytes) -> Any:
    """Return an encoded image as vLLM's processors take it.

    Raises:
        AdmissionError: *data* is not an image that vLLM can decode.
    """
    from vllm.multimodal.media.image import ImageMediaIO

    try:
        return ImageMediaIO().load_bytes(data)
    except Exception as error:  # decoders raise errors of many types
        raise AdmissionError(f"an image of the prompt cannot be decoded: {error}") from None


class ImageCache:
    """Reads and decodes each image once for all rollouts that need it at about the same time.

    Args:
        read: returns an encoded image by its hash; None if there is none.
    """

    def __init__(self, read: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._read = read
        self._loading: dict[str, asyncio.Future[Any]] = {}
        self._loaded: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        """Hash → image and its size, least recently used first."""
        self._size = 0

    async def get(self, digest: str) -> Any:
        """Return an image by its hash, decoded.

        Raises:
            AdmissionError: the image is not there any more, or cannot be decoded.
        """
        if (found := self._loaded.get(digest)) is not None:
            self._loaded.move_to_end(digest)
            return found[0]
        loading = self._loading.get(digest)
        if loading is None:
            loading = self._loading[digest] = asyncio.ensure_future(self._load(digest))
            loading.add_done_callback(lambda _: self._loading.pop(digest))
        return await asyncio.shield(loading)

    async def _load(self, digest: str) -> Any:
        data = await self._read(digest)
        if data is None:
            raise AdmissionError(
                f"the image {digest} of the prompt is not in Redis any more, because its client has ended or was "
                "disconnected for long; send the request again under another id"
            )
        image = await asyncio.to_thread(decode_image, data)
        width, height = image.media.size
        size = len(data) + width * height * len(image.media.getbands())
        self._loaded[digest] = image, size
        self._size += size
        while self._size > MAX_CACHED_BYTES:
            self._size -= self._loaded.popitem(last=False)[1][1]
        return image
