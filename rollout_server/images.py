"""Images of HTTP requests, as the job's engines take them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes

from rollout_api.client.prompts import images_by_hash
from rollout_api.client.request_client import RequestClient
from rollout_server.engine_core import http_errors
from rollout_server.request_context import current_context

CONNECTOR = "rollout"
"""Name of :class:`ImageConnector` in vLLM's environment variable ``VLLM_MEDIA_CONNECTOR``."""
_SOURCE = "rollout_source"
"""Key of a rendered prompt under which :func:`keep_sources` adds what the prompt was rendered from."""


class _Connection(HTTPConnection):  # type: ignore[misc]  # mypy skips vLLM, so the base class is Any
    """Downloads from the addresses of domains."""

    def __init__(self, domains: Sequence[str]) -> None:
        super().__init__()
        self._domains = domains
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        """See the base class."""
        if self._session is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            connector = aiohttp.TCPConnector(resolver=PublicResolver(self._domains))
            self._session = aiohttp.ClientSession(trust_env=True, connector=connector)
        return self._session


@cache
def _connection(domains: tuple[str, ...]) -> _Connection:
    return _Connection(domains)  # vLLM makes a connector for each request


class PublicResolver(ThreadedResolver):
    """Finds the addresses of *domains* that everyone can reach, or that are among the domains themselves.

    The owner of a name could otherwise make it stand for an address of the cluster, or of a cloud's metadata service.
    Other names are those of proxies.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        super().__init__()
        self._domains = domains

    async def resolve(self, host: str, *args: Any, **kwargs: Any) -> list[ResolveResult]:
        """See the base class.

        Raises:
            VLLMValidationError: the domain has private addresses only.
        """
        found: list[ResolveResult] = await super().resolve(host, *args, **kwargs)
        if host not in self._domains:
            return found
        allowed = [one for one in found if _is_public(one["host"]) or one["host"] in self._domains]
        if not allowed:
            raise VLLMValidationError(
                f"the domain {host} stands for a private address; to allow it, start the server with this address in "
                "--allowed-media-domains, too",
                parameter="image_url",
            )
        return allowed


def _is_public(address: str) -> bool:
    parsed = ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class ImageConnector(MediaConnector):  # type: ignore[misc]  # mypy skips vLLM, so the base class is Any
    """Loads images from where vLLM's options allow it, and from nowhere else.

    A server may reach what its clients must not, and vLLM would download images from everywhere by default.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection = _connection(tuple(self.allowed_media_domains))

    async def load_from_url_async(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """See the base class, which raises other errors for some URLs that cannot be used.

        Raises:
            ValueError: the image may not, or cannot, be loaded.
        """
        if not url.lower().startswith(("data:", "file:")) and not self.allowed_media_domains:
            raise ValueError(
                "the server downloads no images; send a data URL, or start it with --allowed-media-domains"
            )
        try:
            return await super().load_from_url_async(url, *args, **kwargs)
        except (VLLMError, aiohttp.ClientError, TimeoutError):  # a failed download may be tried again
            raise
        except Exception as error:  # decoders raise errors of many types
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class MediaSource:
    """What vLLM's renderer has made a prompt with media from."""

    prompt: Mapping[str, Any] = field(default_factory=dict)
    """The prompt with its media, as the renderer has received it; empty if it was rendered elsewhere."""
    is_truncated: bool = False
    """Whether tokens were removed after the media got theirs."""
    positions: Sequence[tuple[int, int]] | None = None
    """Index and number of the tokens of each image, if the prompt has these already."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""
        token_ids: Sequence[int] = self.prompt["prompt_token_ids"]
        return token_ids

    def images(self) -> list[bytes]:
        """Return the encoded images, as they were uploaded or downloaded.

        Raises:
            VLLMValidationError: the engines of a job could not render the same prompt.
        """
        if not self.prompt:
            raise _refusal("features that another server has rendered", "features")
        media: Mapping[str, Any] = self.prompt.get("multi_modal_data") or {}
        if other := sorted(media.keys() - {"image"}):
            raise _refusal(other[0])
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if self.prompt.get(name):
                raise _refusal(name, name)
        if self.is_truncated:
            raise _refusal("truncate_prompt_tokens with images", "truncate_prompt_tokens")
        items = media.get("image") or [None]
        images = [item.original_bytes for item in items if isinstance(item, MediaWithBytes)]
        if len(images) < len(items):
            raise _refusal("image embeddings, and hashes or uuids of images that this job has not rendered recently")
        return images


def keep_sources(renderer: Any, client: RequestClient) -> None:
    """Let vLLM's renderer return, with each prompt that has media, what it has made it from.

    If the client only renders, it gets the hashes of the images, which are stored, in place of what the model reads of
    them.
    """
    process = renderer._process_tokens_async

    async def process_and_keep(prompt: Any, **kwargs: Any) -> Any:
        rendered = await process(prompt, **kwargs)
        if rendered["type"] != "multimodal":
            return rendered
        if not current_context().only_renders:
            return {**rendered, _SOURCE: (prompt, len(rendered["prompt_token_ids"]))}
        hashes, images = images_by_hash(MediaSource(prompt).images(), "the prompt")
        with http_errors():
            client.job.check_images(images, "the prompt")
            if await client.images.store(images):
                raise client.images.no_room()
        return {**rendered, "mm_hashes": {"image": hashes}, "mm_kwargs": {}}

    renderer._process_tokens_async = process_and_keep


async def take_source(rendered: Any, client: RequestClient) -> MediaSource | None:
    """Remove and return what a prompt was rendered from; None for a prompt without media.

    Raises:
        VLLMError: Redis cannot be reached.
    """
    if not isinstance(rendered, dict) or rendered.get("type") != "multimodal":
        return None
    token_ids = rendered["prompt_token_ids"]
    if (kept := rendered.pop(_SOURCE, None)) is not None:
        prompt, num_tokens = kept
        return MediaSource(prompt, is_truncated=num_tokens > len(token_ids))
    if rendered["mm_hashes"].keys() != {"image"} or any(item is not None for item in rendered["mm_kwargs"]["image"]):
        return MediaSource()
    with http_errors():
        stored = await client.images.read(rendered["mm_hashes"]["image"])
    images = [None if image is None else MediaWithBytes(None, image) for image in stored]
    positions = [(place.offset, place.length) for place in rendered["mm_placeholders"]["image"]]
    return MediaSource({"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}, positions=positions)


def _refusal(what: str, parameter: str | None = None) -> VLLMValidationError:
    return VLLMValidationError(
        f"engines of a rollout job do not support {what}; send images in messages, as image_url with a data URL",
        parameter=parameter,
    )
