"""``rollout doctor --cluster`` on a real API server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_api import parse_job
from rollout_tools.doctor.cluster.examination import examine_cluster
from rollout_tools.doctor.findings import Finding, Severity
from tests.support.cluster.chart import render_chart
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.control_plane import CRDS, ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.raw_api import RawApi
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.waiting import wait_for

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
VERSION = version("das-rollout")
Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(cluster: ControlPlane, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """A function that returns the findings about a job in the test's namespace, by their checks."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "kubectl").symlink_to(cluster.binaries / "bin" / cluster.kubectl_name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def findings(kubeconfig: Path = cluster.kubeconfig, **sections: Any) -> dict[str, Finding]:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        job = parse_job(jobs.manifest("math", **sections))
        return {one.check: one for one in examine_cluster(job, None, VERSION)}

    return findings


def apply(cluster: ControlPlane, *objects: dict[str, Any]) -> None:
    """Create or update objects."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


@pytest.mark.current_cluster
def test_a_cluster_without_the_chart(cluster: ControlPlane, nodes: VirtualNodes, examine: Examine) -> None:
    found = examine()
    expected = {
        "API server": OK,
        "Kubernetes": OK,
        "CRD rolloutjobs": OK,
        "CRD clusterrolloutruntimes": OK,
        "CRD rolloutruntimes": OK,
        "operator": ERROR,
        "Pod Security": OK,
        "quotas": OK,
        "NetworkPolicies": OK,
        "nodes": OK,
    }
    assert expected == {check: found[check].severity for check in expected}
    assert f"https://127.0.0.1:{cluster.port}" == found["API server"].seen
    assert "3 of 3 nodes are ready and schedulable; 16 nvidia.com/gpu on 2 of them" in found["nodes"].seen


@pytest.fixture
def other_crd(cluster: ControlPlane) -> Iterator[None]:
    """The CRD of jobs without one of its fields, as of another release."""
    file = CRDS / "rolloutjobs.das.rollout.dev.yaml"
    crd = yaml.safe_load(file.read_text())
    for one in crd["spec"]["versions"]:
        del one["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["failedPods"]
    path = cluster.directory / "other-crd.json"
    path.write_text(json.dumps(crd))
    cluster.kubectl("apply", "--server-side", "-f", str(path))
    yield
    cluster.kubectl("apply", "--server-side", "-f", str(file))


@pytest.mark.current_cluster
@pytest.mark.usefixtures("other_crd")
def test_a_crd_of_another_release_is_recognized(examine: Examine) -> None:
    found = examine()
    assert (WARNING, OK) == (found["CRD rolloutjobs"].severity, found["CRD rolloutruntimes"].severity)


@pytest.fixture
def deployment(cluster: ControlPlane, jobs: Jobs) -> Iterator[dict[str, Any]]:
    """The chart's Deployment of the operator, beside another Deployment."""
    (found,) = (
        one
        for one in render_chart(jobs.namespace, operator={"namespaces": [jobs.namespace]})
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "das-operator"
    )
    other = {**found, "metadata": {"name": "web", "namespace": jobs.namespace}}
    apply(cluster, found, other)
    yield found
    cluster.kubectl("delete", "deployments", "das-operator", "web", "-n", jobs.namespace)


@pytest.mark.current_cluster
def test_the_operator_must_be_ready_and_leading(
    cluster: ControlPlane, jobs: Jobs, examine: Examine, deployment: dict[str, Any]
) -> None:
    found = examine()
    assert "web" not in found["operator"].seen
    assert (ERROR, ERROR) == (found["operator"].severity, found["leader"].severity)
    assert f"nobody holds the Lease {jobs.namespace}/das-operator" == found["leader"].seen

    path = f"/apis/apps/v1/namespaces/{jobs.namespace}/deployments/das-operator/status"
    RawApi(cluster.client()).patch(path, {"status": {"replicas": 2, "readyReplicas": 2}})
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "das-operator", "namespace": jobs.namespace},
        "spec": {
            "holderIdentity": "pod-1",
            "leaseDurationSeconds": 15,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    apply(cluster, lease)
    found = examine()
    assert (OK, OK) == (found["operator"].severity, found["leader"].severity)
    assert f"version {VERSION}, 2 of 2 replicas ready" in found["operator"].seen
    assert "pod-1 has renewed the Lease" in found["leader"].seen


@pytest.mark.current_cluster
def test_a_namespace_that_rejects_pods(cluster: ControlPlane, jobs: Jobs, examine: Examine) -> None:
    namespace = {"namespace": jobs.namespace}
    apply(
        cluster,
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "gpus", **namespace},
            "spec": {"hard": {"requests.nvidia.com/gpu": "1"}},
        },
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small", **namespace},
            "spec": {"limits": [{"type": "Container", "max": {"memory": "8Gi"}}]},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "closed", **namespace},
            "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", **namespace},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": jobs.namespace,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        },
    )
    found = examine(
        workers={"replicas": 2, "resources": {"memory": "64Gi"}, "podTemplate": {"spec": {"hostNetwork": True}}},
        model={"cache": {"persistentVolumeClaim": "models"}},
        weights={"persistentVolumeClaim": "weights"},
        priorityClassName="urgent",
    )
    expected = {
        "ResourceQuota gpus": ERROR,
        "LimitRange small": ERROR,
        "NetworkPolicies": ERROR,
        "claim models": WARNING,
        "claim weights": ERROR,
        "PriorityClass": ERROR,
        "Pod Security": WARNING,
    }
    assert expected == {check: found[check].severity for check in expected}


@pytest.mark.current_cluster
def test_nodes_without_the_accelerator(nodes: VirtualNodes, examine: Examine) -> None:
    found = examine(workers={"accelerator": "nvidia-b200"})["nodes"]
    assert ERROR == found.severity
    assert "das.rollout.dev/accelerator=nvidia-b200" in found.advice


@pytest.mark.complete_cluster
def test_the_permissions_of_users_and_of_the_operator(
    cluster: CompleteControlPlane, jobs: Jobs, examine: Examine, deployment: dict[str, Any]
) -> None:
    user = "das-operator"
    account = f"system:serviceaccount:{jobs.namespace}:{user}"
    found = examine()
    assert (OK, ERROR) == (found["your permissions"].severity, found["operator's permissions"].severity)
    assert f"{account} is denied in {jobs.namespace}: list rolloutjobs" in found["operator's permissions"].seen

    kinds = ("ServiceAccount", "Role", "RoleBinding")
    objects = render_chart(jobs.namespace, operator={"namespaces": [jobs.namespace]}, redis={"bundled": False})
    apply(cluster, *(one for one in objects if one["kind"] in kinds))
    wait_for(lambda: examine()["operator's permissions"].severity is OK, message="The roles have no effect.")

    restricted = examine(cluster.service_account_kubeconfig(jobs.namespace, user))
    assert ERROR == restricted["your permissions"].severity
    assert "create rolloutjobs.das.rollout.dev" in restricted["your permissions"].seen
    assert "list rolloutjobs.das.rollout.dev" not in restricted["your permissions"].seen
    assert WARNING == restricted["nodes"].severity
    assert "not examined" in restricted["nodes"].seen
    assert (WARNING, "served") == (restricted["CRDs"].severity, restricted["CRDs"].seen.partition(",")[0])
