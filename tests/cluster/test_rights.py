"""The operator under the chart's role: it may do what it does, and does what it may."""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client
from rollout_operator import names

from tests.support.cluster.chart import render
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes

KINDS = ["serviceaccounts", "configmaps", "services", "networkpolicies", "poddisruptionbudgets"]
PRECAUTIONS = {
    # asked for by clusters whose admission guards owners (OwnerReferencesPermissionEnforcement)
    ("update", "das.rollout.dev", "rolloutjobs/finalizers"),
}


def allowed(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Verb, group and resource of all roles."""
    return {
        (verb, group, resource)
        for one in objects
        if one["kind"] in ("Role", "ClusterRole")
        for rule in one["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def done(cluster: ControlPlane, user: str) -> set[tuple[str, str, str]]:
    """What the audit log has of a user, the discovery that everybody may do apart."""
    found = set()
    for entry in cluster.asked_by(user):
        if (about := entry.get("objectRef")) is not None and about.get("resource"):
            resource = about["resource"] + (f"/{about['subresource']}" if about.get("subresource") else "")
            found.add((entry["verb"], about.get("apiGroup", ""), resource))
    return found


def test_its_rights_are_what_it_uses(cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes) -> None:
    objects = render(jobs.namespace, operator={"namespaces": [jobs.namespace]}, redis={"bundled": False})
    for one in objects:
        if one["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(one))
    access = cluster.access_of(jobs.namespace, "das-operator")
    log = cluster.directory / "log" / "operator-rights.log"
    lease = f"--lease={jobs.namespace}/das-operator"
    operator = OperatorProcess(access, log, f"--namespace={jobs.namespace}", lease, "--log-format=text")
    operator.start()
    operator.wait_until_ready()
    try:
        # objects of others by the names that it would take
        for one in ("taken-manifest", "taken-connection"):
            jobs.core.create_namespaced_config_map(jobs.namespace, {"metadata": {"name": one}})
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
        client.NetworkingV1Api(api).create_namespaced_network_policy(
            jobs.namespace, {"metadata": {"name": "taken-rollout"}, "spec": {"podSelector": {}}}
        )
        budget = {
            "apiVersion": "policy/v1beta1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "taken-workers", "namespace": jobs.namespace},
            "spec": {"maxUnavailable": 1},
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(budget))
        jobs.make("taken")
        jobs.wait(lambda: jobs.events("taken").get("NameTaken"))

        jobs.make("math", lifecycle={"ttlSecondsAfterFinished": 1})
        jobs.wait(lambda: len(jobs.running("math")) == 3)
        for kind in KINDS:
            label = f"{names.COMPONENT_LABEL}=changed"
            cluster.kubectl("-n", jobs.namespace, "label", "--overwrite", kind, "-l", f"{names.JOB_LABEL}=math", label)
        jobs.wait(
            lambda: (
                not jobs.core.list_namespaced_config_map(
                    jobs.namespace, label_selector=f"{names.COMPONENT_LABEL}=changed"
                ).items
            )
        )
        nodes.end(jobs.namespace, "math-worker-0", 1)
        jobs.wait(lambda: jobs.status("math").get("failedPods") == 1 and len(jobs.running("math")) == 3)
        nodes.end(jobs.namespace, "math-head")
        jobs.wait(lambda: jobs.get("math") is None)
    finally:
        operator.terminate()
    assert "Forbidden" not in log.read_text()
    user = f"system:serviceaccount:{jobs.namespace}:das-operator"
    assert allowed(objects) - PRECAUTIONS == done(cluster, user)
