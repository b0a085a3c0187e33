"""Writing the status of a job: the API server may reject it, and progress is written less often than conditions."""

from __future__ import annotations

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster.apply import execute
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.objects.observed import HeadStatus, format_timestamp
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


def test_progress_of_a_young_job_is_written_whenever_it_is_read() -> None:
    cluster = running_job()
    cluster.job["metadata"]["creationTimestamp"] = format_timestamp(cluster.now)
    written = []
    for _ in range(12):
        cluster.now += 10
        cluster.head = HeadStatus.model_validate(cluster.head.model_dump() | {"done": cluster.head.done + 1})
        planned = cluster.plan()
        written.append(planned.status is not None)
        cluster.execute(planned)
    assert all(written[:6])
    assert not all(written[6:])


def test_progress_alone_is_written_once_a_minute_and_anything_else_at_once() -> None:
    cluster = running_job()

    def num_writes(seconds: int, **reported: object) -> int:
        count = 0
        for second in range(0, seconds, 10):
            cluster.now += 10
            done = {"done": cluster.head.done + 1, "tokens_per_second": 1000.0 + second, "saved": second / 1000}
            cluster.head = HeadStatus.model_validate(cluster.head.model_dump() | done | reported)
            planned = cluster.plan()
            count += planned.status is not None
            cluster.execute(planned)
        return count

    num_writes(600)
    assert 10 == num_writes(600)
    assert cluster.head.done - cluster.status["progress"]["done"] < 6
    for reported, kind in (({"waiting": 5, "assigned": 0}, "Progressing"), ({"engines": ()}, "EngineReady")):
        before = cluster.condition(kind)
        assert 1 == num_writes(10, **reported)
        assert before != cluster.condition(kind)
        assert cluster.head.done == cluster.status["progress"]["done"]
    error = {"count": 1, "problem": "p", "message": "m"}
    assert 1 == num_writes(10, environment_errors={"timeout": error})
    assert 0 == num_writes(10, environment_errors={"timeout": {**error, "count": 2}})
    assert 1 == num_writes(10, environment_errors={"timeout": error, "exit": error})


def test_progress_that_does_not_change_is_not_written() -> None:
    cluster = running_job()
    for _ in range(30):
        cluster.now += 10
        assert cluster.plan().status is None
