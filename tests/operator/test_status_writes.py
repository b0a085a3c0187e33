"""Writing the status of a job: the API server may reject it, and progress is written less often than conditions."""

from __future__ import annotations

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster.apply import execute
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.planning.actions import Create, DeletePod
from rollout_operator.planning.plan import plan

from tests.support.planned_jobs import running_job


async def test_a_status_that_the_api_server_rejects_does_not_stand_before_deletions() -> None:
    requests: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.method, request.path))
        if request.path.endswith("/status"):
            status = {"kind": "Status", "reason": "Invalid", "message": "status.state: Unsupported value"}
            return web.json_response(status, status=422)
        return web.json_response({"kind": "Status", "metadata": {}})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = KubernetesApi(ApiClient(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")))
    try:
        cluster = running_job()
        cluster.job["metadata"]["resourceVersion"] = "1"
        cluster.change(lifecycle={"suspend": True})
        observed = cluster.observe()
        planned = plan(observed)
        deleted = [action.name for action in planned.actions if isinstance(action, DeletePod)]
        assert deleted
        with pytest.raises(ApiError, match="Unsupported value"):
            await execute(api, ObjectCache(), observed, planned)
        assert deleted == [path.rpartition("/")[2] for method, path in requests if method == "DELETE"]
        assert ["/api/v1/namespaces/rl/events"] == [path for method, path in requests if method == "POST"]
        requests.clear()

        cluster.change(lifecycle={"suspend": False})
        cluster.pods.pop("math-worker-0")
        observed = cluster.observe()
        planned = plan(observed)
        assert any(isinstance(action, Create) for action in planned.actions)
        with pytest.raises(ApiError, match="Unsupported value"):
            await execute(api, ObjectCache(), observed, planned)
        assert ["/api/v1/namespaces/rl/events"] == [path for method, path in requests if method == "POST"]
    finally:
        await api.close()
        await runner.cleanup()
