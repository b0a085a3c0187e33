"""The status of heads whose pods run on virtual nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

from aiohttp import web
from rollout_operator.objects import names

from rollout_api.length_stats import LengthClass
from rollout_head.coordinator.status_server import StatusServer
from rollout_store.job import EngineReport
from rollout_store.runtime.engine_metrics import ENGINE_METRICS, LABELED_ENGINE_METRICS
from tests.support.job_status import job_status

_LABELS = {
    "source": ("history", "siblings", "self", "pool"),
    "position": [*map(str, range(1, 16)), "16+"],
    "class": list(LengthClass),
}
"""Values of the labels of engines' counters."""


class Heads(StatusServer):
    """Serves one status for every head, with the counters and names of engines on workers with eight each."""

    def __init__(self, num_engines: int, host: str) -> None:
        """Serve it at *host*, an address of this machine; ``0.0.0.0`` for all of 127.0.0.0/8."""
        reports = {
            f"math-worker-{number // 8}/0/{number % 8}/{number:032x}": EngineReport(
                f"math-worker-{number // 8}/engine-{number % 8}",
                worker=f"math-worker-{number // 8}/0",
                max_running=128,
                counters=dict.fromkeys(ENGINE_METRICS, 123456.789),
                labeled_counters={
                    name: dict.fromkeys(_LABELS[label], 123456)
                    for name, (_, label, _) in LABELED_ENGINE_METRICS.items()
                },
            )
            for number in range(num_engines)
        }
        self._builder = job_status(reports)
        super().__init__(self._builder)
        self.reads = 0
        """Number of requests so far."""
        self._loop, self._stopping = asyncio.new_event_loop(), asyncio.Event()
        self._loop.run_until_complete(self.start(host, names.HTTP_PORT))
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._update(),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _update(self) -> None:
        while not self._stopping.is_set():
            done = int(time.time())
            self._builder.update({"rollouts": done, "decoding_steps": done, "accepted_tokens": done}, {}, {})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)
        await self.stop()

    async def _status(self, request: web.Request) -> web.Response:
        self.reads += 1
        return await super()._status(request)
