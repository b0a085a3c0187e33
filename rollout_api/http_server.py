"""An HTTP server for a process's metrics and status pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rollout_api.status_token import UNAUTHORIZED_HEADERS, UNAUTHORIZED_TEXT, StatusToken

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves ``/metrics`` and further pages from the running asyncio event loop."""

    def __init__(
        self, registry: CollectorRegistry, pages: Mapping[str, Handler], token: StatusToken | None = None
    ) -> None:
        """Create a server; :meth:`start` makes it listen.

        Args:
            registry: the metrics that ``/metrics`` returns.
            pages: path → handler of ``GET`` requests.
            token: what all pages except for ``/healthz`` and ``/readyz`` need; None for nothing.
        """
        self._registry, self._pages, self._token = registry, pages, token or StatusToken()
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
        application = web.Application(middlewares=[self._check_token])
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

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._token.permits(request.path, request.headers.get("Authorization")):
            return web.Response(text=UNAUTHORIZED_TEXT, status=401, headers=UNAUTHORIZED_HEADERS)
        return await handler(request)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
