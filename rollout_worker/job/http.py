"""``/status``, ``/metrics`` and ``/healthz`` of a coordinator."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rollout_worker.job.status import StatusBoard, StatusCollector

_REDIS_AWAY_S = 8.0
"""A coordinator makes a new status every second, unless it waits for Redis."""


class StatusServer:
    """Serves a :class:`StatusBoard` over HTTP from the running asyncio loop."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatusCollector(board))
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on *port*, or on a free one for 0.

        Returns:
            The port.

        Raises:
            OSError: if the port is taken.
        """
        application = web.Application()
        application.add_routes(
            [
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _status(self, _: web.Request) -> web.Response:
        if self._board.last is None:
            return web.json_response(
                {"error": "the coordinator is still reading what Redis has of the job"}, status=503
            )
        away = None
        if self._board.age > _REDIS_AWAY_S:
            away = f"Redis has not answered the coordinator for {self._board.age:.0f} s"
        return web.json_response({**self._board.last, "redis_away": away})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")
