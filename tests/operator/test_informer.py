"""Informers of kinds without which the operator works, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rollout_operator.cluster import informer
from rollout_operator.cluster.informer import Informer, WorkQueue
from rollout_operator.cluster.kubernetes_api import CLUSTER_RUNTIMES, ApiError
from rollout_operator.cluster.object_cache import JobKey, ObjectCache, RuntimeCache
from rollout_operator.objects.runtimes import RuntimeKey

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
