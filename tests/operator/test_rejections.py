"""Actions that the API server rejects: how often they are tried, and what they mean for other jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient
from rollout_operator.cluster.apply import execute
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.cluster.reconciler import Reconciler
from rollout_operator.objects import names
from rollout_operator.objects.observed import Observed, Rejection
from rollout_operator.planning.actions import Action, Create, DeletePod, Plan

from tests.support.simulated_cluster import SimulatedCluster

NUM_CARELESS = 20
NUM_WORKERS = 64


class ApiWithQuota(KubernetesApi):
    """An API server in memory whose namespaces have a quota of pods."""

    def __init__(self, cache: ObjectCache, quota: int) -> None:
        super().__init__(cast(ApiClient, None))
        self.quota = quota
        self.requests: list[tuple[str, str, str]] = []
        """Namespace, kind and name of all requests."""
        self.num_rejected: Counter[str] = Counter()
        """Number of rejected requests by namespace."""
        self.taken: set[str] = set()
        """Names that objects of others have."""
        self.owners: list[dict[str, str]] = []
        """Their owners."""
        self.created: set[str] = set()
        """Names of all pods."""
        self._cache = cache
        self._num_pods: Counter[str] = Counter()
        self._versions = itertools.count(2)

    async def create(self, manifest: Any) -> dict[str, Any]:
        namespace = await self._request(manifest)
        if manifest["metadata"]["name"] in self.taken:
            raise ApiError(409, "AlreadyExists", "there is one")
        if manifest["kind"] == "Pod":
            if self._num_pods[namespace] >= self.quota:
                self.num_rejected[namespace] += 1
                raise ApiError(403, "Forbidden", f"exceeded quota, attempt {sum(self.num_rejected.values())}")
            self._num_pods[namespace] += 1
            self.created.add(manifest["metadata"]["name"])
        return self._stored(manifest)

    async def apply(self, manifest: Any, *, subresource: str = "") -> dict[str, Any]:
        namespace = await self._request(manifest)
        if subresource:
            job = self._cache.job((namespace, manifest["metadata"]["name"]))
            assert job is not None
            return self._stored({**job, "status": manifest["status"]})
        return self._stored(manifest)

    async def patch(self, manifest: Any, *, subresource: str = "") -> dict[str, Any]:
        namespace = await self._request(manifest)
        job = self._cache.job((namespace, manifest["metadata"]["name"]))
        assert job is not None
        return self._stored({**job, "metadata": {**job["metadata"], **manifest["metadata"]}})

    async def get(self, reference: Any) -> dict[str, Any]:
        await self._request(reference)
        return {**reference, "metadata": {**reference["metadata"], "uid": "foreign", "ownerReferences": self.owners}}

    async def delete(self, reference: Any, *, uid: str | None = None, grace_period: int | None = None) -> None:
        await self._request(reference)

    async def _request(self, manifest: Any) -> str:
        metadata = manifest["metadata"]
        self.requests.append((metadata["namespace"], manifest["kind"], metadata["name"]))
        await asyncio.sleep(0)
        namespace: str = metadata["namespace"]
        return namespace

    def _stored(self, manifest: Any) -> dict[str, Any]:
        version = str(next(self._versions))
        return {**manifest, "metadata": {"uid": f"uid-{version}", **manifest["metadata"], "resourceVersion": version}}


def job(namespace: str, name: str, replicas: int) -> dict[str, Any]:
    cluster = SimulatedCluster(
        {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}, "workers": {"replicas": replicas}}
    )
    assert cluster.job is not None
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}", "resourceVersion": "1"}
    return {**cluster.job, "metadata": {**cluster.job["metadata"], **metadata}}


def pod(number: int, component: str = names.WORKER) -> Create:
    metadata = {"namespace": "rl", "name": f"pod-{number}", "labels": {names.COMPONENT_LABEL: component}}
    return Create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})


def _name(action: Action) -> str:
    name: str = action.manifest["metadata"]["name"] if isinstance(action, Create) else ""
    return name


class Retries:
    """Executes the same actions every few seconds of a simulated time."""

    def __init__(self, *actions: Action, quota: int = 0) -> None:
        self.cache = ObjectCache()
        self.api = ApiWithQuota(self.cache, quota)
        self.actions = actions
        self.observed: Observed = replace(SimulatedCluster({}).observe(), now=0.0)

    async def run(self, seconds: int, generation: int = 1) -> tuple[Rejection, ...]:
        end = self.observed.now + seconds
        while self.observed.now < end:
            metadata = {**self.observed.metadata, "generation": generation}
            self.observed = replace(self.observed, job={**self.observed.job, "metadata": metadata})
            actions = tuple(action for action in self.actions if _name(action) not in self.api.created)
            rejections = await execute(self.api, self.cache, self.observed, Plan(actions=actions))
            self.observed = replace(self.observed, rejections=rejections, now=self.observed.now + 5)
        return rejections


async def test_pods_beyond_a_quota_cost_few_requests() -> None:
    retries = Retries(*map(pod, range(NUM_WORKERS)))
    (rejection,) = await retries.run(5)
    assert ("pod-0", "Forbidden") == (rejection.target.name, rejection.reason)
    assert 1 == len(retries.api.requests)
    await retries.run(3600)
    assert 25 < retries.api.num_rejected["rl"] < 30  # after 10, 20, 40, 80, 160, 160 … seconds


async def test_a_quota_that_is_raised_is_used_at_the_next_attempt() -> None:
    retries = Retries(*map(pod, range(NUM_WORKERS)))
    await retries.run(1000)
    retries.api.quota = 10
    (rejection,) = await retries.run(165)
    assert "pod-10" == rejection.target.name
    retries.api.quota = NUM_WORKERS
    assert () == await retries.run(165)
    assert NUM_WORKERS == len(retries.api.created)


async def test_a_changed_spec_is_tried_at_once() -> None:
    retries = Retries(pod(0))
    await retries.run(200)
    before = retries.api.num_rejected["rl"]
    await retries.run(5, generation=2)
    assert before + 1 == retries.api.num_rejected["rl"]


async def test_a_rejection_does_not_concern_actions_of_another_kind() -> None:
    retries = Retries(pod(0), pod(1), pod(2, names.HEAD), pod(3, names.HEAD), DeletePod("pod-4", "uid"))
    rejections = await retries.run(5)
    assert ["pod-0", "pod-2"] == [rejection.target.name for rejection in rejections]
    assert ["pod-0", "pod-2", "pod-4"] == [name for _, _, name in retries.api.requests]


async def test_a_name_that_is_taken_concerns_only_one_object() -> None:
    retries = Retries(*map(pod, range(3)), quota=3)
    retries.api.taken = {"pod-1"}
    (rejection,) = await retries.run(5)
    assert ("pod-1", "NameConflict") == (rejection.target.name, rejection.reason)
    assert {"pod-0", "pod-1", "pod-2"} == {name for _, _, name in retries.api.requests}


def account() -> Create:
    metadata = {"namespace": "rl", "name": "account", "labels": {names.COMPONENT_LABEL: "pods"}}
    return Create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})


async def test_no_pod_is_created_while_the_name_of_its_service_account_is_taken() -> None:
    retries = Retries(account(), pod(0), quota=1)
    retries.api.taken = {"account"}
    (rejection,) = await retries.run(100)
    assert ("account", "NameConflict") == (rejection.target.name, rejection.reason)
    assert not retries.api.created
    retries.api.taken = set()
    await retries.run(165)
    assert {"pod-0"} == retries.api.created


async def test_a_job_that_is_created_again_waits_for_the_objects_of_its_predecessor_to_be_deleted() -> None:
    retries = Retries(account(), pod(0), quota=1)
    retries.api.taken = {"account"}
    retries.api.owners = [{"kind": "RolloutJob", "name": retries.observed.metadata["name"], "uid": "predecessor"}]
    with pytest.raises(ApiError, match="StillTerminating") as caught:
        await retries.run(5)
    assert caught.value.transient
    assert not retries.api.created


async def test_jobs_beyond_their_quota_do_not_delay_the_head_of_another_tenant() -> None:
    cache = ObjectCache()
    api = ApiWithQuota(cache, quota=2)
    reconciler = Reconciler(api, cache, "image")
    for number in range(NUM_CARELESS):
        reconciler.queue.add(cache.update_job(job("careless", f"job-{number}", NUM_WORKERS)))
    reconciling = asyncio.create_task(reconciler.run())
    while len(api.requests) < NUM_CARELESS:
        await asyncio.sleep(0)
    num_before = len(api.requests)
    reconciler.queue.add(cache.update_job(job("other", "math", 1)))
    head = ("other", "Pod", "math-head")
    while head not in api.requests:
        await asyncio.sleep(0.001)
    # The job itself needs ten requests until then, and 8 other jobs of the namespace may be reconciled meanwhile.
    assert api.requests.index(head) - num_before <= 9 * 10
    while ("other", "Pod", "math-worker-0") not in api.requests or reconciler.num_queued < NUM_CARELESS + 1:
        await asyncio.sleep(0.001)
    events = Counter(namespace for namespace, kind, _ in api.requests if kind == "Event")
    assert events["careless"] <= 2 * NUM_CARELESS
    assert api.num_rejected["careless"] <= 2 * NUM_CARELESS  # a head and a worker of each job
    reconciling.cancel()
    await asyncio.wait({reconciling})
