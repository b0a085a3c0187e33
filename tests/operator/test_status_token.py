"""A token protects /status and /metrics of all servers, and the operator reads the status of heads with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from kubernetes.aio.client import ApiClient
from rollout_operator.cluster import head_status
from rollout_operator.cluster.head_status import HeadStatusReader
from rollout_operator.cluster.http_server import MetricsCollector, OperatorServer
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.cluster.reconciler import Reconciler
from rollout_operator.objects import names
from rollout_operator.objects.observed import PodView

from rollout_api.ports import free_port
from rollout_api.status_token import HASH_VARIABLE, TOKEN_VARIABLE, StatusToken
from rollout_head.coordinator.status_server import StatusServer
from rollout_store.history_service.service import HistoryServer, ServiceState
from tests.support.job_status import job_status

TOKEN = "a-token-of-thirty-two-characters"
WITH_TOKEN = StatusToken.from_environment({TOKEN_VARIABLE: TOKEN})


async def statuses(url: str, headers: dict[str, str]) -> dict[str, int]:
    """Return the HTTP status of each page."""
    found = {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path in ("status", "metrics", "healthz", "readyz"):
            async with session.get(f"{url}/{path}") as response:
                found[path] = response.status
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"].startswith("Bearer")
                    assert "rollout_" not in await response.text()
    return found


def operator_server() -> OperatorServer:
    api, cache = KubernetesApi(cast(ApiClient, None)), ObjectCache()
    server = OperatorServer(MetricsCollector(api, cache, Reconciler(api, cache, "image"), None), WITH_TOKEN)
    server.ready = True
    return server


async def test_servers_for_other_machines_listen_on_the_addresses_of_ipv4_and_ipv6() -> None:
    server, port = HistoryServer(ServiceState()), free_port("")
    await server.start(None, port)
    for host in ("127.0.0.1", "[::1]"):
        assert 200 == (await statuses(f"http://{host}:{port}", {}))["healthz"]
    await server.stop()


@pytest.mark.parametrize(
    ("make", "readyz"),
    [
        (operator_server, 200),
        (lambda: HistoryServer(ServiceState(), WITH_TOKEN), 503),  # Redis has not answered yet.
    ],
    ids=["operator", "history service"],
)
async def test_the_metrics_of_a_service_need_the_token(make: Callable[[], Any], readyz: int) -> None:
    server = make()
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    probes = {"healthz": 200, "readyz": readyz}
    assert {"status": 401, "metrics": 401, **probes} == await statuses(url, {})
    assert {"status": 404, "metrics": 200, **probes} == await statuses(url, WITH_TOKEN.headers())
    await server.stop()


@asynccontextmanager
async def serving_head(token: StatusToken) -> AsyncIterator[str]:
    """A head's server, with the environment of a head's pod."""
    environment = {HASH_VARIABLE: token.sha256} if token.sha256 else {}
    server = StatusServer(job_status(), StatusToken.from_environment(environment))
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


async def test_the_pages_of_a_head_need_the_token() -> None:
    probes = {"healthz": 200, "readyz": 200}
    async with serving_head(WITH_TOKEN) as url:
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
            assert {"status": 401, "metrics": 401, **probes} == await statuses(url, headers)
        assert {"status": 200, "metrics": 200, **probes} == await statuses(url, WITH_TOKEN.headers())
    async with serving_head(StatusToken()) as url:
        assert {"status": 200, "metrics": 200, **probes} == await statuses(url, {})


async def test_the_operator_reads_the_status_of_heads_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_status, "_MAX_WAIT_S", 10.0)
    async with serving_head(WITH_TOKEN) as url:
        monkeypatch.setattr(names, "HTTP_PORT", int(url.rpartition(":")[2]))
        for token, is_permitted in ((WITH_TOKEN, True), (None, False)):
            reader = HeadStatusReader(token)
            pod = PodView.from_pod(
                {
                    "metadata": {"name": "head", "uid": "head", "labels": {names.COMPONENT_LABEL: names.HEAD}},
                    "spec": {"nodeName": "node"},
                    "status": {"phase": "Running", "podIP": "127.0.0.1"},
                }
            )
            assert is_permitted == (await reader.read(pod, lambda: None) is not None)
            await reader.close()


def test_the_operator_does_not_start_with_a_token_that_could_be_guessed() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "rollout_operator", "--worker-image=w", "--log-format=text"],
        env={"PATH": "/usr/bin", TOKEN_VARIABLE: "short"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 1 == process.returncode
    assert f"{TOKEN_VARIABLE} must have at least 32 characters" in process.stderr + process.stdout
    assert "Traceback" not in process.stderr
