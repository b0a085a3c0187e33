"""The chart's dashboards on a real Prometheus that scrapes a real job and the history service."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

import yaml

from rollout_api import AsyncRolloutClient
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.spec import Sampling
from rollout_api.ports import free_port
from rollout_worker.job.coordinator.status_server import StatusServer
from tests.support.cluster.chart import CHART
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import JobHarness, gather, prompts
from tests.support.prometheus_server import PrometheusServer, needs_prometheus, prometheus_server
from tests.support.waiting import wait_for_async

DASHBOARDS = [json.loads(file.read_text()) for file in sorted((CHART / "files" / "dashboards").glob("*.json"))]
VARIABLES = {"$namespace": "models", "$job": ".*", "$__rate_interval": "10s"}
SECONDS_TO_DATA = 60


def queries() -> dict[str, str]:
    """Return the queries of all panels except for the operator's, by a name that tells where each is from."""
    found = {}
    for dashboard in DASHBOARDS:
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                if "rollout_operator_" not in expression:
                    found[f"{dashboard['title']} / {panel['title']} / {target['legendFormat']}"] = expression
    return found


def without_data(server: PrometheusServer) -> list[str]:
    """Return the queries that have no number as a result."""
    empty = []
    for name, expression in queries().items():
        values = [one["value"][1] for one in server.query(expression)]
        if not any(value not in ("NaN", "+Inf") for value in values):
            empty.append(name)
    return empty


@needs_prometheus
def test_every_panel_shows_data_of_a_real_job(job_harness: JobHarness, tmp_path: Path) -> None:
    history_port = free_port()
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        assert running.coordinator is not None
        status = StatusServer(running.coordinator.board)
        targets = {
            f"127.0.0.1:{await status.start('127.0.0.1', 0)}": {"namespace": "models"},
            f"127.0.0.1:{history_port}": {"namespace": "rollouts"},
        }
        service = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "rollout_worker.history_service.cli", "serve"),
            *("--redis", job_harness.url, "--port", str(history_port)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        steps = asyncio.ensure_future(sample_steps(client, job_harness))
        try:
            with prometheus_server(tmp_path, targets, rules) as server:
                unshown = partial(without_data, server)
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
    return not await asyncio.to_thread(without_data, server)


async def sample_steps(client: AsyncRolloutClient, job_harness: JobHarness) -> None:
    """Sample the same prompts step by step, with new weights before each step, until cancelled."""
    for step in range(1, 1000):
        await client.publish_weights(step, job_harness.models / str(step % 3))
        await gather(client, step, prompts(6, sampling=Sampling(n=4, max_tokens=100)))
