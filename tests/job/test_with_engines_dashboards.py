"""The chart's dashboards on a real Prometheus that scrapes a real job and the history service."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from rollout_api import AsyncRolloutClient
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.spec import Sampling
from rollout_api.ports import free_port
from rollout_head.coordinator.status_server import StatusServer
from tests.support.cluster.chart import CHART
from tests.support.dashboard_queries import OPERATOR, dashboard_queries, without_data
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import JobHarness, gather, prompts
from tests.support.prometheus_server import PrometheusServer, needs_prometheus, prometheus_server
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.slow

QUERIES = {name: query for name, query in dashboard_queries("models").items() if OPERATOR not in query}
"""The operator's panels are tested on a cluster."""
SECONDS_TO_DATA = 60


@needs_prometheus
def test_every_panel_shows_data_of_a_real_job(job_harness: JobHarness, tmp_path: Path) -> None:
    history_port = free_port()
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        assert running.coordinator is not None
        running.store.metadata.open("tokenizer", "model", max_bytes=1 << 30)  # as the launcher of a job does
        status = StatusServer(running.coordinator.status)
        targets = {
            f"127.0.0.1:{await status.start('127.0.0.1', 0)}": {"namespace": "models"},
            f"127.0.0.1:{history_port}": {"namespace": "rollouts"},
        }
        service = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "rollout_store.history_service.cli", "serve"),
            *("--redis", job_harness.url, "--port", str(history_port)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        steps = asyncio.ensure_future(sample_steps(client, job_harness))
        try:
            with prometheus_server(tmp_path, targets, rules) as server:
                unshown = partial(without_data, server, QUERIES)
                await wait_for_async(partial(all_shown, server), SECONDS_TO_DATA, lambda: f"no data: {unshown()}")
                assert set() == server.firing()
                running.redis.xadd(running.keys.requests, {"d": b"no message"})
                await wait_for_async(lambda: asyncio.to_thread(server.firing), SECONDS_TO_DATA)
                assert {"RolloutDeadLetters"} == server.firing()
        finally:
            await cancel_and_wait(steps)
            service.terminate()
            await service.wait()
            await status.stop()

    job_harness.run(scenario, seconds=240)


async def all_shown(server: PrometheusServer) -> bool:
    return not await asyncio.to_thread(without_data, server, QUERIES)


async def sample_steps(client: AsyncRolloutClient, job_harness: JobHarness) -> None:
    """Sample the same prompts step by step, with new weights before each step, until cancelled."""
    for step in range(1, 1000):
        await client.publish_weights(step, job_harness.models / str(step % 3))
        await gather(client, step, prompts(6, sampling=Sampling(n=4, max_tokens=100)))
