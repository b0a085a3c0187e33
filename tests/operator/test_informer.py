"""Informers of kinds without which the operator works, too, and API servers that fall silent or have no jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster import informer
from rollout_operator.cluster.informer import Informer, WorkQueue
from rollout_operator.cluster.kubernetes_api import CLUSTER_RUNTIMES, ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import JobKey, ObjectCache, RuntimeCache
from rollout_operator.objects.runtimes import RuntimeKey

from rollout_api.asyncio_tasks import cancel_and_wait

KEY = RuntimeKey("ClusterRolloutRuntime", "", "h100")
RUNTIME = {"metadata": {"name": "h100", "uid": "1"}, "spec": {"image": {"name": "platform:1"}}}


class Api:
    """An API server that answers the first requests with an error."""

    def __init__(self, status: int, errors: int) -> None:
        self._status, self._errors = status, errors

    async def list_pages(self, *_: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
        assert not options["selector"]  # people create runtimes, not the operator
        if self._errors:
            self._errors -= 1
            raise ApiError(self._status, "Error", "no")
        yield {"metadata": {"resourceVersion": "1"}, "items": [RUNTIME]}

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        yield await asyncio.Event().wait()


@pytest.mark.parametrize("status", [403, 404])
async def test_an_optional_kind_that_is_not_available_is_not_waited_for(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "_UNAVAILABLE_RETRY_DELAYS_S", {status: 0.05})
    queue = WorkQueue[JobKey]()
    jobs = ObjectCache()
    reference = {"runtimeRef": {"name": "h100"}}
    jobs.update_job({"metadata": {"namespace": "rl", "name": "math", "uid": "2"}, "spec": reference})
    runtimes = RuntimeCache(jobs, queue.add)
    watched = Informer(Api(status, errors=2), runtimes, queue, CLUSTER_RUNTIMES, "", selector="", optional=True)
    task = asyncio.ensure_future(watched.run())
    await asyncio.wait_for(watched.synced.wait(), 5)
    assert runtimes.settings(KEY) is None
    assert ("rl", "math") == await asyncio.wait_for(queue.get(), 5)  # as soon as it is available
    assert RUNTIME["spec"] == runtimes.settings(KEY)
    task.cancel()


async def test_a_required_kind_that_must_not_be_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "_RETRY_DELAY_S", 0.01)
    queue = WorkQueue[JobKey]()
    watched = Informer(
        Api(403, errors=10**9), RuntimeCache(ObjectCache(), queue.add), queue, CLUSTER_RUNTIMES, "", selector=""
    )
    task = asyncio.ensure_future(watched.run())
    await asyncio.sleep(0.2)
    assert not watched.synced.is_set()
    task.cancel()


async def test_a_cluster_without_jobs_has_null_in_place_of_their_list() -> None:
    async def serve(_: web.Request) -> web.Response:
        return web.json_response({"kind": "PartialObjectMetadataList", "metadata": {}, "items": None})

    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    async with TestServer(application) as server:
        api = KubernetesApi(ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))))
        try:
            assert set() == await api.job_keys("rl")
        finally:
            await api.close()


async def test_a_watch_that_falls_silent_is_continued_from_its_last_version() -> None:
    """A network that has lost a connection delivers neither data nor an end, which looks like a silent server."""
    stopped = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        version = request.query["resourceVersion"]
        response = web.StreamResponse()
        await response.prepare(request)
        name = {"1": "first", "2": "second"}.get(version)
        if name is not None:
            metadata = {"name": name, "uid": version, "resourceVersion": str(int(version) + 1)}
            event = {"type": "ADDED", "object": {"metadata": metadata, "spec": {"image": {"name": name}}}}
            await response.write(json.dumps(event).encode() + b"\n")
        await stopped.wait()
        return response

    queue = WorkQueue[JobKey]()
    jobs = ObjectCache()
    for name in ("first", "second"):
        jobs.update_job({"metadata": {"namespace": "rl", "name": name}, "spec": {"runtimeRef": {"name": name}}})
    runtimes = RuntimeCache(jobs, queue.add)
    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    async with TestServer(application) as server:
        client = ApiClient(Configuration(host=str(server.make_url("")).rstrip("/")))
        api = KubernetesApi(client, watch_inactivity_s=0.2)
        task = asyncio.ensure_future(Informer(api, runtimes, queue, CLUSTER_RUNTIMES, "", selector="").run())
        try:
            assert ("rl", "first") == await asyncio.wait_for(queue.get(), 5)
            assert ("rl", "second") == await asyncio.wait_for(queue.get(), 5)
        finally:
            await cancel_and_wait(task)
            stopped.set()
            await api.close()
