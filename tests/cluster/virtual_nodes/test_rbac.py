"""The operator with the permissions that the chart grants it: they are sufficient, and all of them are needed."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client
from rollout_operator.objects import names
from rollout_operator.objects.names import COSCHEDULING_API, GANG_KIND, GANG_PLURAL

from tests.support.cluster.chart import render_chart
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.control_plane import unvalidated_crd
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes

pytestmark = pytest.mark.complete_cluster
POD_GROUPS_GROUP, POD_GROUPS_VERSION = COSCHEDULING_API.split("/")
KINDS = ["serviceaccounts", "configmaps", "services", "deployments", "networkpolicies", "poddisruptionbudgets"]
UNUSED_PERMISSIONS = {
    # Required only on clusters with the admission plugin OwnerReferencesPermissionEnforcement.
    ("update", "das.rollout.dev", "rolloutjobs/finalizers"),
    # Required only when a node is lost.
    ("get", "", "nodes"),
    ("patch", "", "pods/status"),
    # Required only with Kueue.
    ("delete", "kueue.x-k8s.io", "workloads"),
    # Required only with Volcano; for the coscheduling plugin, the same requests are made.
    # The same holds for Kubernetes' own PodGroups.
    *(
        (verb, group, "podgroups")
        for verb in ("get", "list", "watch", "create", "patch")
        for group in ("scheduling.volcano.sh", "scheduling.k8s.io")
    ),
}


def granted_permissions(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return verb, group and resource of everything that the chart's roles permit."""
    return {
        (verb, group, resource)
        for manifest in objects
        if manifest["kind"] in ("Role", "ClusterRole")
        for rule in manifest["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used_permissions(cluster: CompleteControlPlane, user: str) -> set[tuple[str, str, str]]:
    """Return verb, group and resource of a user's requests, without discovery, which every user may do."""
    used = set()
    for entry in cluster.audit_entries(user):
        target = entry.get("objectRef")
        if target is not None and target.get("resource"):
            resource = target["resource"] + (f"/{target['subresource']}" if target.get("subresource") else "")
            used.add((entry["verb"], target.get("apiGroup", ""), resource))
    return used


def test_the_operator_needs_exactly_the_permissions_of_the_chart(
    cluster: CompleteControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    objects = render_chart(
        jobs.namespace,
        operator={"namespaces": [jobs.namespace], "readNodes": True, "readClusterRuntimes": True},
        redis={"bundled": False},
    )
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    rights = [manifest for manifest in objects if manifest["kind"] in kinds]
    cluster.apply(*rights)
    kubeconfig = cluster.service_account_kubeconfig(jobs.namespace, "das-operator")
    log = cluster.directory / "log" / "operator-rights.log"
    lease = f"--lease={jobs.namespace}/das-operator"
    approval = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins"}
    cluster.serve_crd(
        unvalidated_crd(POD_GROUPS_GROUP, POD_GROUPS_VERSION, GANG_KIND, GANG_PLURAL, annotations=approval)
    )
    pod_groups = client.CustomObjectsApi(cluster.client())
    in_namespace = (POD_GROUPS_GROUP, POD_GROUPS_VERSION, jobs.namespace, GANG_PLURAL)
    operator = OperatorProcess(kubeconfig, log, f"--namespace={jobs.namespace}", lease, "--log-format=text")
    operator.start()
    operator.wait_until_ready()
    try:
        # Objects that do not belong to the job but have the names of the job's objects. The operator has to read them.
        for name in ("taken-manifest", "taken-connection"):
            jobs.core.create_namespaced_config_map(jobs.namespace, {"metadata": {"name": name}})
        jobs.core.create_namespaced_service_account(jobs.namespace, {"metadata": {"name": "taken-rollout"}})
        port = {"port": 1, "protocol": "TCP"}
        jobs.core.create_namespaced_service(
            jobs.namespace, {"metadata": {"name": "taken-head"}, "spec": {"ports": [port]}}
        )
        jobs.core.create_namespaced_pod(
            jobs.namespace,
            {"metadata": {"name": "taken-head"}, "spec": {"containers": [{"name": "c", "image": "c"}]}},
        )
        api = cluster.client()
        labels = {"app": "other"}
        pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "c"}]}}
        client.AppsV1Api(api).create_namespaced_deployment(
            jobs.namespace,
            {
                "metadata": {"name": "web-server"},
                "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod},
            },
        )
        client.NetworkingV1Api(api).create_namespaced_network_policy(
            jobs.namespace, {"metadata": {"name": "taken-rollout"}, "spec": {"podSelector": {}}}
        )
        budget = {
            "apiVersion": "policy/v1beta1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "taken-rollout", "namespace": jobs.namespace},
            "spec": {"maxUnavailable": 1},
        }
        cluster.apply(budget)
        taken = {"apiVersion": COSCHEDULING_API, "kind": GANG_KIND, "metadata": {"name": "large-worker-1"}, "spec": {}}
        pod_groups.create_namespaced_custom_object(*in_namespace, taken)
        jobs.create("taken")
        jobs.wait_for_event("taken", "NameConflict")
        jobs.create(
            "large", engine={"tensorParallelSize": 4}, workers={"podsPerWorker": 2, "gpusPerWorker": 4, "replicas": 2}
        )
        jobs.wait_for_event("large", "NameConflict")
        label = {"metadata": {"labels": {names.COMPONENT_LABEL: "changed"}}}
        pod_groups.patch_namespaced_custom_object(*in_namespace, "large-worker-0", label)

        def component() -> str:
            found = pod_groups.get_namespaced_custom_object(*in_namespace, "large-worker-0")
            return str(found["metadata"]["labels"][names.COMPONENT_LABEL])

        jobs.wait(lambda: component() != "changed")
        jobs.delete("large")

        jobs.create("web", server={})
        jobs.wait_for_event("web", "NameConflict")
        client.AppsV1Api(api).delete_namespaced_deployment("web-server", jobs.namespace)
        jobs.wait(lambda: jobs.status("web").get("server") == {"replicas": 1, "ready": 1})
        jobs.patch("web", server={"replicas": 2})
        jobs.wait(lambda: jobs.status("web").get("server") == {"replicas": 2, "ready": 2})
        jobs.patch("web", server=None)
        for kind in ("deployment", "service", "networkpolicy"):
            find = ("-n", jobs.namespace, "get", kind, "web-server", "--ignore-not-found", "-o", "name")
            jobs.wait(lambda find=find: not cluster.kubectl(*find).stdout)
        jobs.delete("web")

        jobs.create("broken", lifecycle={"backoffLimit": 0})
        jobs.wait_for_running("broken", 3)
        nodes.terminate_pod(jobs.namespace, "broken-worker-0", 1)
        jobs.wait_for_event("broken", "KeepingBundle")
        jobs.wait(lambda: "broken-head" not in jobs.pods("broken"))
        jobs.core.read_namespaced_config_map("broken-bundle", jobs.namespace)
        jobs.delete("broken")

        jobs.create("math", lifecycle={"ttlSecondsAfterFinished": 1})
        jobs.wait_for_running("math", 3)
        label = f"{names.COMPONENT_LABEL}=changed"
        selector = f"{names.JOB_LABEL}=math"
        cluster.kubectl("-n", jobs.namespace, "label", "--overwrite", ",".join(KINDS), "-l", selector, label)
        jobs.wait(
            lambda: (
                not jobs.core.list_namespaced_config_map(
                    jobs.namespace, label_selector=f"{names.COMPONENT_LABEL}=changed"
                ).items
            )
        )
        nodes.terminate_pod(jobs.namespace, "math-worker-0", 1)
        jobs.wait(lambda: jobs.status("math").get("failedPods") == 1 and len(jobs.running("math")) == 3)
        nodes.terminate_pod(jobs.namespace, "math-head")
        jobs.wait(lambda: jobs.get("math") is None)
    finally:
        operator.terminate()
    assert "Forbidden" not in log.read_text()
    user = f"system:serviceaccount:{jobs.namespace}:das-operator"
    assert granted_permissions(objects) - UNUSED_PERMISSIONS == used_permissions(cluster, user)
