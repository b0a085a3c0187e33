"""The coordinator's HTTP server: ``/status``, ``/metrics``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry

from rollout_api.http_server import HttpServer
from rollout_api.protocol.status import BRIEF_ENGINE_FIELDS, ServedStatus
from rollout_api.status_token import StatusToken
from rollout_head.coordinator.metrics import StatusMetrics
from rollout_head.coordinator.status import StatusBuilder

_STALE_STATUS_S = 8.0
"""Age of a status, in seconds, from which on Redis is reported as unavailable; a status is made every second."""
_STARTING = "the coordinator is still reading the job's state"


class StatusServer(HttpServer):
    """Serves the last status of a :class:`StatusBuilder`."""

    def __init__(self, builder: StatusBuilder, token: StatusToken | None = None) -> None:
        self._builder = builder
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusMetrics(builder))
        pages = {"/status": self._status, "/healthz": self._health, "/readyz": self._readiness}
        super().__init__(registry, pages, token)

    async def _status(self, request: web.Request) -> web.Response:
        if self._builder.last is None:
            return web.json_response({"error": _STARTING}, status=503)
        redis_error = None
        if self._builder.age_s > _STALE_STATUS_S:
            redis_error = f"Redis has not answered the coordinator for {self._builder.age_s:.0f} s"
        status: ServedStatus = {**self._builder.last, "redis_error": redis_error}
        if request.query.get("engines") != "brief":
            return web.json_response(status)
        engines = [
            {name: value for name, value in engine.items() if name in BRIEF_ENGINE_FIELDS}
            for engine in status["engines"]
        ]
        return web.json_response({**status, "engines": engines})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._builder.last is None:
            return web.Response(text=f"{_STARTING}\n", status=503)
        return web.Response(text="ok\n")
