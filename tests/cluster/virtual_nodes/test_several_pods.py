"""Workers with several pods, on a cluster whose scheduler has PodGroups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rollout_operator.objects import names

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import running_operator
from tests.support.cluster.pod_groups import POD_GROUPS_PATH, pod_groups_crd
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.waiting import wait_for

pytestmark = pytest.mark.current_cluster
POD_GROUPS_CRD = pod_groups_crd()["metadata"]["name"]


@pytest.fixture
def gang_cluster(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """A cluster that serves the PodGroups of the coscheduling plugin, without its scheduler."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod_groups_crd()))
    wait_for(lambda: not cluster.kubectl("get", "--raw", POD_GROUPS_PATH, check=False).returncode, 30)
    yield cluster
    cluster.kubectl("delete", "crd", POD_GROUPS_CRD)


def pod_groups(jobs: Jobs) -> dict[str, dict[str, Any]]:
    """Return the PodGroups of a namespace by name."""
    output = jobs.cluster.kubectl("-n", jobs.namespace, "get", POD_GROUPS_CRD, "-o", "json").stdout
    return {item["metadata"]["name"]: item for item in json.loads(output)["items"]}


def test_a_worker_is_a_gang_of_pods_and_is_removed_as_a_whole(
    gang_cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    workers = {"replicas": 2, "podsPerWorker": 2, "gpusPerWorker": 4, "accelerator": None}
    with running_operator(gang_cluster, jobs.namespace):
        jobs.create("large", engine={"tensorParallelSize": 4}, workers=workers)
        jobs.wait_for_running("large", 5)
        assert {"large-worker-0": 2, "large-worker-1": 2} == {
            name: group["spec"]["minMember"] for name, group in pod_groups(jobs).items()
        }
        expected = {"large-worker-0", "large-worker-0-1", "large-worker-1", "large-worker-1-1"}
        pods = jobs.pods("large", names.WORKER)
        assert expected == set(pods)
        assert {"2"} == {pod.spec.containers[0].resources.limits["nvidia.com/gpu"] for pod in pods.values()}

        # A drain of a follower lets its leader hand over, and the worker is replaced as a whole.
        uids = {name: pod.metadata.uid for name, pod in pods.items()}
        jobs.core.delete_namespaced_pod("large-worker-1-1", jobs.namespace)

        def is_replaced() -> bool:
            found = {name: pod.metadata.uid for name, pod in jobs.pods("large", names.WORKER).items()}
            replaced = {name for name, uid in uids.items() if found.get(name, uid) != uid}
            return {"large-worker-1", "large-worker-1-1"} == replaced

        jobs.wait(is_replaced, 90)
        assert 0 == jobs.status("large").get("failedPods")
