"""A process's own figures over HTTP: ``/metrics``, and whatever else it says of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Answers from the running asyncio loop."""

    def __init__(self, registry: CollectorRegistry, pages: Mapping[str, Handler]) -> None:
        """Listen to nothing yet.

        Args:
            registry: what ``/metrics`` says.
            pages: path → what answers ``GET`` of it.
        """
        self._registry, self._pages = registry, pages
        self._runner: web.AppRunner | None = None

    async def start(self, host: str | None, port: int) -> int:
        """Listen on *port* of *host* (None: all addresses), or on a free one for 0.

        Returns:
            The port.

        Raises:
            OSError: if the port is taken.
        """
        application = web.Application()
        application.add_routes([web.get(path, answer) for path, answer in self._pages.items()])
        application.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, shutdown_timeout=1).start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
