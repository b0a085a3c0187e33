"""Jobs that were deleted while the operator could not watch them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster.kopf_watch import remove_missing_jobs
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.object_cache import JobKey, ObjectCache

from rollout_api.asyncio_tasks import cancel_and_wait
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs


@pytest.mark.parametrize("in_one_namespace", [True, False])
def test_a_job_whose_deletion_was_not_reported_is_removed(
    cluster: ControlPlane, jobs: Jobs, in_one_namespace: bool
) -> None:
    cache, removed = ObjectCache(), list[JobKey]()
    for name in ("deleted", "existing"):
        cache.update_job(jobs.create(name))
    jobs.delete("deleted")

    async def compare() -> None:
        configuration = Configuration()
        await config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=configuration)
        api = KubernetesApi(ApiClient(configuration))
        namespaces = [jobs.namespace] if in_one_namespace else []
        task = asyncio.ensure_future(remove_missing_jobs(api, cache, removed.append, namespaces, period_s=0.1))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 1.0)
        await cancel_and_wait(task)
        await api.close()

    asyncio.run(compare())
    assert [(jobs.namespace, "deleted")] == removed
    assert {(jobs.namespace, "existing")} == cache.job_keys()
