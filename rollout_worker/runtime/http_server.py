"""An HTTP server for a process's metrics and status pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves ``/metrics`` and further pages from the running asyncio event loop."""

    def __init__(self, registry: CollectorRegistry, pages: Mapping[str, Handler]) -> None:
        """Create a server; :meth:`start` makes it listen.

        Args:
            registry: the metrics that ``/metrics`` returns.
            pages: path → handler of ``GET`` requests.
        """
        self._registry, self._pages = registry, pages
        self._runner: web.AppRunner | None = None

    async def start(self, host: str | None, port: int) -> int:
        """Start to listen.

        Args:
            host: the address; None for all addresses.
            port: the port; 0 for a free one.

        Returns:
            The port.

        Raises:
            OSError: if the port is in use.
        """
        application = web.Application()
        application.add_routes([web.get(path, handler) for path, handler in self._pages.items()])
        application.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, shutdown_timeout=1).start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
