"""How the objects of a cluster are checked."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.names import labels as operator_labels
from rollout_operator.objects.pods import head_pod, server_pod, worker_pod

from rollout_api import parse_job
from rollout_api.manifest.field_types import parse_quantity
from rollout_tools.doctor.findings import Severity
from rollout_tools.doctor.installation import (
    MIN_KUBERNETES,
    OPERATOR_SELECTOR,
    USER_ACCESSES,
    Access,
    check_admission_policy,
    check_crd,
    check_lease,
    check_monitoring,
    check_operator,
    check_operator_account,
    check_served_api,
    check_user,
    check_version,
    operator_accesses,
)
from rollout_tools.doctor.pods import (
    check_claim,
    check_dns,
    check_name,
    check_namespace,
    check_network_policies,
    check_nodes,
    check_priority_class,
    check_quotas,
    check_storage_classes,
    check_worker_memory,
    pod_needs,
    worker_labels,
)
from scripts.crd import documents
from tests.support.cluster.chart import CHART, render_chart
from tests.support.manifests import rollout_job

NOW = datetime.now(UTC)
OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR


def manifest(**sections: Any) -> Any:
    return parse_job(rollout_job(namespace="team", **sections))


# Workers


@pytest.mark.parametrize(
    ("workers", "severity"),
    [
        ({}, WARNING),
        ({"resources": {"cpu": 8}}, WARNING),
        ({"resources": {"memory": "64Gi"}}, OK),
        ({"gpusPerWorker": 0}, WARNING),
    ],
)
def test_workers_should_request_memory(workers: dict[str, Any], severity: Severity) -> None:
    (worker,) = (pods for pods in pod_needs(manifest(workers=workers)) if pods.component == "worker")
    finding = check_worker_memory(worker)
    assert severity == finding.severity
    assert ("workers.resources.memory" in finding.advice) == (severity is WARNING)


# What is installed


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ({"major": "1", "minor": "28", "gitVersion": "v1.28.9"}, ERROR),
        ({"major": "1", "minor": "29", "gitVersion": "v1.29.0"}, OK),
        ({"major": "1", "minor": "33+", "gitVersion": "v1.33.4-eks-1"}, OK),
    ],
)
def test_kubernetes_must_be_new_enough(version: dict[str, str], severity: Severity) -> None:
    assert severity == check_version(version).severity


def test_the_minimum_version_is_that_of_the_chart() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f">={'.'.join(map(str, MIN_KUBERNETES))}.0-0" == chart["kubeVersion"]


def test_crds_are_compared_with_those_of_this_release() -> None:
    established = {"conditions": [{"type": "Established", "status": "True"}]}
    for crd in documents().values():
        name = crd["metadata"]["name"]
        assert OK == check_crd(name, {**crd, "status": established}).severity
        assert ERROR == check_crd(name, crd).severity
        assert ERROR == check_crd(name, None).severity
        other = copy.deepcopy({**crd, "status": established})
        other["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].popitem()
        assert WARNING == check_crd(name, other).severity
        other["spec"]["versions"] = [{**version, "name": "v1"} for version in crd["spec"]["versions"]]
        assert ERROR == check_crd(name, other).severity


def test_users_who_may_not_read_crds_learn_whether_jobs_are_served() -> None:
    served = {"resources": [{"name": "rolloutjobs"}, {"name": "rolloutjobs/status"}]}
    assert [WARNING] == [one.severity for one in check_served_api(served, ["rolloutjobs"])]
    for missing in (served, None):
        (finding,) = check_served_api(missing, ["rolloutjobs", "rolloutruntimes"])
        assert ERROR == finding.severity
        assert "rolloutruntimes" in finding.seen


def operator_deployment(*namespaces: str, **status: Any) -> dict[str, Any]:
    """Return the chart's Deployment of an operator that runs the jobs of some namespaces, or of all."""
    name, _, value = OPERATOR_SELECTOR.partition("=")
    (found,) = (
        one
        for one in render_chart("das-system", operator={"namespaces": list(namespaces)})
        if one["kind"] == "Deployment" and one["metadata"]["labels"][name] == value
    )
    return {**found, "status": status}


def test_the_operator_must_be_ready_and_of_the_same_version() -> None:
    ready = operator_deployment(readyReplicas=2)
    version = ready["metadata"]["labels"]["app.kubernetes.io/version"]
    (good,) = check_operator([ready], "team", version)
    assert (OK, f"das-system/das-operator, version {version}, 2 of 2 replicas ready") == (good.severity, good.seen)
    assert [WARNING] == [one.severity for one in check_operator([ready], "team", "9.9.9")]
    assert [ERROR] == [one.severity for one in check_operator([operator_deployment()], "team", version)]
    assert [ERROR] == [one.severity for one in check_operator([], "team", version)]


def test_an_operator_may_be_limited_to_other_namespaces() -> None:
    others, own = operator_deployment("a", "b", readyReplicas=2), operator_deployment("team", readyReplicas=2)
    assert [OK] == [one.severity for one in check_operator([others, own], "team", None)]
    (finding,) = check_operator([others], "team", None)
    assert ERROR == finding.severity
    assert "no jobs of the namespace team" in finding.seen


@pytest.mark.parametrize(("age", "severity"), [(3, OK), (60, ERROR)])
def test_a_leader_renews_its_lease(age: int, severity: Severity) -> None:
    renewed = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {"spec": {"holderIdentity": "pod-1", "leaseDurationSeconds": 15, "renewTime": renewed}}
    assert severity == check_lease("a/b", lease, NOW).severity


@pytest.mark.parametrize("lease", [None, {"spec": {}}, {"spec": {"holderIdentity": ""}}])
def test_a_lease_that_nobody_holds_is_an_error(lease: dict[str, Any] | None) -> None:
    assert ERROR == check_lease("a/b", lease, NOW).severity


def test_the_admission_policy_of_the_chart_is_recognized() -> None:
    objects = render_chart("das-system", admissionPolicy={"restrictPodTemplates": True})
    policies = [one for one in objects if one["kind"] == "ValidatingAdmissionPolicy"]
    assert "das-operator-pod-templates" in check_admission_policy(policies).seen
    assert "not restricted" in check_admission_policy([]).seen


def test_the_prometheus_operator_is_recognized() -> None:
    assert "can be used" in check_monitoring([{"name": "apps"}, {"name": "monitoring.coreos.com"}]).seen
    assert "leave" in check_monitoring([{"name": "apps"}]).seen


# Permissions


def test_the_operators_accesses_are_those_of_the_chart() -> None:
    (role,) = (
        one
        for one in render_chart("das-system")
        if one["kind"] == "ClusterRole" and one["metadata"]["name"] == "das-operator.das-system"
    )
    granted = {
        Access(verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == set(operator_accesses())


def test_a_subresource_is_a_field_of_its_own_in_a_review() -> None:
    expected = {"namespace": "n", "verb": "patch", "group": "", "resource": "pods", "subresource": "status"}
    assert expected == Access("patch", "", "pods/status").attributes("n")


def test_denied_accesses_are_named() -> None:
    denied = [USER_ACCESSES[0]]
    finding = check_user(denied, "team")
    assert (ERROR, "denied in team: create rolloutjobs.das.rollout.dev") == (finding.severity, finding.seen)
    assert ERROR == check_operator_account("x", denied, "team").severity
    assert {OK} == {check_user([], "team").severity, check_operator_account("x", [], "team").severity}


# The namespace


@pytest.mark.parametrize(
    ("labels", "uses_templates", "severity"),
    [
        ({}, True, OK),
        ({"pod-security.kubernetes.io/enforce": "restricted"}, False, OK),
        ({"pod-security.kubernetes.io/enforce": "restricted"}, True, WARNING),
    ],
)
def test_the_pod_security_level_concerns_templates(
    labels: dict[str, str], uses_templates: bool, severity: Severity
) -> None:
    (finding,) = check_namespace("team", {"metadata": {"labels": labels}}, uses_templates=uses_templates)
    assert severity == finding.severity


def test_a_missing_namespace_or_priority_class_is_an_error() -> None:
    assert [ERROR] == [one.severity for one in check_namespace("team", None, uses_templates=False)]
    assert (ERROR, OK) == (check_priority_class("p", None).severity, check_priority_class("p", {"value": 5}).severity)


def amounts(pod: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the requests and limits of a pod's container. The API server completes requests from limits."""
    resources = pod["spec"]["containers"][0]["resources"]
    limits = {name: parse_quantity(amount) for name, amount in resources.get("limits", {}).items()}
    requests = {name: parse_quantity(amount) for name, amount in resources.get("requests", {}).items()}
    return limits | requests, limits


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"head": {"resources": {"cpu": "2", "memory": "4Gi"}}, "server": {"resources": {"memory": "3Gi"}}},
        {"workers": {"resources": {"cpu": "8", "extended": {"rdma/hca": 2}}, "gpuResource": "amd.com/gpu"}},
        {"workers": {"gpusPerWorker": 4, "podsPerWorker": 2}, "engine": {"tensorParallelSize": 4}, "server": {}},
        {"workers": {"deviceClaimTemplate": "gpus"}},
        {"source": {"dataset": {"environment": {"verifiers": "gsm8k"}}}},
    ],
)
def test_the_pods_of_a_job_are_those_of_the_operator(sections: dict[str, Any]) -> None:
    job = manifest(**sections)
    context = JobContext(job, "uid", {}, "worker:1")
    built = {"head": head_pod(context), "worker": worker_pod(context, 0, replacement=False)}
    if job.spec.server is not None:
        built["server"] = server_pod(context, job.spec.server)
    expected = {component: amounts(pod) for component, pod in built.items()}
    assert expected == {one.component: (dict(one.requests), dict(one.limits)) for one in pod_needs(job)}


def test_all_pods_of_the_largest_job_are_counted() -> None:
    scaled = {"replicas": 2, "minReplicas": 1, "maxReplicas": 3, "autoscale": True}
    job = manifest(
        workers={**scaled, "gpusPerWorker": 4, "podsPerWorker": 2},
        engine={"tensorParallelSize": 4},
        server={"replicas": 2},
    )
    assert [("head", 1), ("worker", 6), ("server", 2)] == [(one.component, one.count) for one in pod_needs(job)]


QUOTA_JOB = {"replicas": 2, "gpusPerWorker": 1, "resources": {"cpu": "8", "memory": "64Gi"}}


@pytest.mark.parametrize(
    ("hard", "used", "limits", "problem"),
    [
        ({"pods": "3"}, {}, [], ""),
        ({"pods": "10"}, {"pods": "8"}, [], "2 of pods left, and the job needs 3"),
        ({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "6"}, [], ""),
        ({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "7"}, [], "1 of requests.nvidia.com/gpu left"),
        ({"requests.memory": "200Gi"}, {}, [], ""),
        ({"memory": "128Gi"}, {}, [], "128.0Gi of memory left, and the job needs 129.0Gi"),
        ({"requests.cpu": "16"}, {}, [], "16 of requests.cpu left, and the job needs 16.5"),
        ({"limits.memory": "200Gi"}, {}, [], "the head sets no memory limit"),
        ({"limits.memory": "200Gi"}, {}, [{"type": "Container", "default": {"memory": "1Gi"}}], ""),
        ({"count/configmaps": "1"}, {}, [], ""),
        ({}, {}, [{"type": "Container", "max": {"memory": "32Gi"}}], "at most 32Gi of memory for each container"),
        ({}, {}, [{"type": "Pod", "max": {"cpu": "4"}}], "at most 4 of cpu for each pod, and a worker has 8"),
        ({}, {}, [{"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}], ""),
    ],
)
def test_quotas_and_limits_that_reject_pods_are_errors(
    hard: dict[str, str], used: dict[str, str], limits: list[dict[str, Any]], problem: str
) -> None:
    quotas = [{"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"used": used}}] if hard else []
    ranges = [{"metadata": {"name": "l"}, "spec": {"limits": limits}}] if limits else []
    (finding,) = check_quotas(quotas, ranges, pod_needs(manifest(workers=QUOTA_JOB)))
    assert (ERROR if problem else OK) == finding.severity
    assert problem in finding.seen


# The network

SELECTED = worker_labels("math")


def policy(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": spec}


def test_the_labels_of_workers_are_those_of_the_operator() -> None:
    # Further labels have values that differ between the pods of a job.
    assert SELECTED.items() <= operator_labels("math", "worker").items()


DNS_RULE = {"ports": [{"port": 53, "protocol": "UDP"}]}


@pytest.mark.parametrize(
    ("spec", "blocked"),
    [
        ({"podSelector": {}, "policyTypes": ["Ingress"]}, ""),
        ({"podSelector": {}, "policyTypes": ["Egress"]}, "Redis (TCP 6380) and DNS"),
        ({"podSelector": {}, "egress": [DNS_RULE]}, "Redis (TCP 6380)"),
        ({"podSelector": {}, "egress": [{}]}, ""),
        ({"podSelector": {}, "egress": [DNS_RULE, {"ports": [{"port": 6380}]}]}, ""),
        ({"podSelector": {}, "egress": [DNS_RULE, {"ports": [{"port": 6000, "endPort": 7000}]}]}, ""),
        ({"podSelector": {}, "egress": [DNS_RULE, {"ports": [{"port": 6379}]}]}, "Redis (TCP 6380)"),
        ({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"]}, ""),
        ({"podSelector": {"matchLabels": {"das.rollout.dev/job": "math"}}, "policyTypes": ["Egress"]}, "DNS"),
        (
            {
                "podSelector": {
                    "matchExpressions": [
                        {"key": "app.kubernetes.io/component", "operator": "In", "values": ["worker"]},
                        {"key": "app", "operator": "DoesNotExist"},
                    ]
                },
                "policyTypes": ["Egress"],
            },
            "DNS",
        ),
        (
            {
                "podSelector": {
                    "matchExpressions": [
                        {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["worker"]}
                    ]
                },
                "policyTypes": ["Egress"],
            },
            "",
        ),
    ],
)
def test_network_policies_that_cut_pods_off_are_errors(spec: dict[str, Any], blocked: str) -> None:
    finding = check_network_policies([policy(spec)], SELECTED, 6380)
    assert (ERROR if blocked else OK) == finding.severity
    assert blocked in finding.seen


def test_rules_of_several_network_policies_are_combined() -> None:
    policies = [
        policy({"podSelector": {}, "egress": [DNS_RULE]}),
        policy({"podSelector": {}, "egress": [{"ports": [{"port": 6379}]}]}),
    ]
    assert OK == check_network_policies(policies, SELECTED, None).severity


def test_the_dns_server_must_be_ready() -> None:
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    failing = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    severities = [check_dns(pods).severity for pods in ([ready, failing], [failing], [])]
    assert [OK, ERROR, WARNING] == severities
    assert (OK, ERROR) == (check_name("a.b", "").severity, check_name("a.b", "unknown").severity)


# Nodes and volumes


def node(gpus: int = 8, *, ready: str = "True", unschedulable: bool = False, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "n", "labels": labels},
        "spec": {"unschedulable": unschedulable},
        "status": {
            "allocatable": {"cpu": "64", "nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@pytest.mark.parametrize(
    ("nodes", "workers", "severity", "text"),
    [
        ([node()], {"replicas": 8}, OK, "8 nvidia.com/gpu on 1 of them"),
        ([node()], {"replicas": 9}, WARNING, "8 of 9 workers"),
        ([node(), node(ready="False"), node(unschedulable=True)], {"replicas": 9}, WARNING, "1 of 3 nodes are ready"),
        ([], {"gpusPerWorker": 0}, ERROR, "0 of 0 nodes"),
        ([node(0)], {"gpusPerWorker": 0}, OK, "1 of 1 nodes"),
        ([node(0)], {}, ERROR, "device plugin"),
        ([node(4), node(4)], {"gpusPerWorker": 8}, ERROR, "divide the worker"),
        ([node(4), node(4)], {"gpusPerWorker": 8, "podsPerWorker": 2}, OK, "room for all 1 workers"),
        ([node(**H100)], {"accelerator": "nvidia-h100"}, OK, ""),
        ([node(**H100)], {"accelerator": "nvidia-b200"}, ERROR, "das.rollout.dev/accelerator=nvidia-b200"),
        ([node(**{"das.rollout.dev/accelerator": "mi300"})], {"accelerator": "mi300"}, OK, ""),
        ([node(0)], {"deviceClaimTemplate": "gpus"}, OK, ""),
        ([node()], {"gpuResource": "amd.com/gpu"}, ERROR, "0 amd.com/gpu"),
    ],
)
def test_workers_need_nodes(
    nodes: list[dict[str, Any]], workers: dict[str, Any], severity: Severity, text: str
) -> None:
    parallel = workers.get("gpusPerWorker", 1) if workers.get("podsPerWorker") else 1
    finding = check_nodes(nodes, manifest(workers=workers, engine={"tensorParallelSize": parallel}).spec.workers)
    assert severity == finding.severity
    assert text in finding.seen + finding.advice


def test_nodes_are_counted_without_a_manifest() -> None:
    assert OK == check_nodes([node()], None).severity


@pytest.mark.parametrize(
    ("claim", "severity"),
    [
        (None, ERROR),
        ({"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}, OK),
        ({"spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}}, WARNING),
        ({"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Pending"}}, WARNING),
        ({"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Lost"}}, ERROR),
    ],
)
def test_claims_must_be_bound(claim: dict[str, Any] | None, severity: Severity) -> None:
    assert severity == check_claim("models", claim).severity


def test_a_default_storage_class_is_recognized() -> None:
    default = {"metadata": {"name": "ssd", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
    assert (OK, "the default is ssd") == (
        check_storage_classes([default]).severity,
        check_storage_classes([default]).seen,
    )
    assert WARNING == check_storage_classes([{"metadata": {"name": "slow"}}]).severity
