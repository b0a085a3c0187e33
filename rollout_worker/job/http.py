"""``/status``, ``/metrics`` and ``/healthz`` of a coordinator."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry

from rollout_worker.http_server import HttpServer
from rollout_worker.job.status import StatusBoard, StatusCollector

_REDIS_AWAY_S = 8.0
"""A coordinator makes a new status every second, unless it waits for Redis."""


class StatusServer(HttpServer):
    """Serves a :class:`StatusBoard`."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusCollector(board))
        super().__init__(registry, {"/status": self._status, "/healthz": self._health})

    async def _status(self, _: web.Request) -> web.Response:
        if self._board.last is None:
            return web.json_response(
                {"error": "the coordinator is still reading what Redis has of the job"}, status=503
            )
        away = None
        if self._board.age > _REDIS_AWAY_S:
            away = f"Redis has not answered the coordinator for {self._board.age:.0f} s"
        return web.json_response({**self._board.last, "redis_away": away})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")
