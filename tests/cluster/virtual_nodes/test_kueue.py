"""A job in a queue of Kueue on a real API server, where the test does what Kueue would.

What an operator and Kueue do in turn, whatever happens meanwhile, is simulated in ``tests/operator``, by the rules in
``tests/support/kueue.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rollout_operator.objects import names

from tests.support import kueue
from tests.support.cluster.control_plane import ControlPlane, unvalidated_crd
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.raw_api import RawApi
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.waiting import wait_for

pytestmark = pytest.mark.current_cluster
JOB = "math"
VERSION = "v1beta2"
GATED = f'''Object{{
  metadata: Object.metadata{{finalizers: ["{kueue.FINALIZER}"]}},
  spec: Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: "{kueue.GATE}"}}]}}
}}'''
OBJECTS: list[dict[str, Any]] = [
    unvalidated_crd(names.KUEUE_GROUP, VERSION, names.WORKLOAD_KIND, names.WORKLOAD_PLURAL),
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": "kueue"},
        "spec": {
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ]
            },
            "matchConditions": [{"name": "queued", "expression": f'"{names.QUEUE_LABEL}" in object.metadata.labels'}],
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": GATED}}],
        },
    },
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "kueue"},
        "spec": {"policyName": "kueue"},
    },
]
"""The CRD of Workloads, and a policy that adds Kueue's scheduling gate and finalizer to pods, as its webhook does."""


@pytest.fixture
def queue(cluster: ControlPlane, jobs: Jobs, operator: OperatorProcess, nodes: VirtualNodes) -> Iterator[RawApi]:
    """A client of the API server of a namespace with an operator, in which pods of queued jobs are gated."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": OBJECTS})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    wait_for(lambda: cluster.kubectl("get", names.WORKLOAD_PLURAL, check=False).returncode == 0, 30)
    # A new policy takes effect after a moment.
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "queued", "namespace": "default", "labels": {names.QUEUE_LABEL: "queue"}},
        "spec": {"containers": [{"name": "container", "image": "image"}]},
    }
    command = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    wait_for(lambda: kueue.GATE in cluster.kubectl(*command, stdin=json.dumps(pod)).stdout, 30)
    api = RawApi(cluster.client())
    yield api
    jobs.clear()
    change_pods(api, jobs, {"metadata": {"finalizers": None}})


def all_pods(api: RawApi, jobs: Jobs) -> dict[str, dict[str, Any]]:
    """Return the pods of a namespace by name, with those that are being deleted."""
    found = api.list_objects(f"/api/v1/namespaces/{jobs.namespace}/pods")
    return {pod["metadata"]["name"]: pod for pod in found}


def change_pods(api: RawApi, jobs: Jobs, change: dict[str, Any]) -> None:
    for name in all_pods(api, jobs):
        api.patch(f"/api/v1/namespaces/{jobs.namespace}/pods/{name}", change)


def test_a_job_starts_when_its_queue_admits_it_and_releases_its_quota_when_it_is_suspended(
    queue: RawApi, jobs: Jobs
) -> None:
    manifest = jobs.manifest(JOB, workers={"replicas": 2, "minReplicas": 2})
    manifest["metadata"]["labels"] = {names.QUEUE_LABEL: "research"}
    jobs.create_from(manifest)
    jobs.wait_for_state(JOB, "Queued")
    group = jobs.status(JOB)["podGroup"]["name"]
    pods = all_pods(queue, jobs)
    assert {f"{JOB}-head", f"{JOB}-worker-0", f"{JOB}-worker-1"} == set(pods)
    for pod in pods.values():
        assert group == pod["metadata"]["labels"][names.POD_GROUP_LABEL]
        assert "3" == pod["metadata"]["annotations"][names.POD_GROUP_TOTAL_ANNOTATION]
    change_pods(queue, jobs, {"spec": {"schedulingGates": None}})
    jobs.wait_for_running(JOB, 3)

    workloads = f"/apis/{names.KUEUE_GROUP}/{VERSION}/namespaces/{jobs.namespace}/{names.WORKLOAD_PLURAL}"
    workload = {
        "apiVersion": f"{names.KUEUE_GROUP}/{VERSION}",
        "kind": names.WORKLOAD_KIND,
        "metadata": {"name": group},
    }
    queue.request("POST", workloads, workload)
    jobs.patch(JOB, lifecycle={"suspend": True})
    # The finalizer keeps the pods until Kueue notices that the Workload was deleted.
    jobs.wait(lambda: not queue.list_objects(workloads), 60)
    assert set(pods) == set(all_pods(queue, jobs))
    change_pods(queue, jobs, {"metadata": {"finalizers": None}})
    jobs.wait_for_state(JOB, "Suspended")
    assert 0 == jobs.status(JOB).get("failedPods", 0)
