"""Examines a cluster: reads what each judgement needs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rollout_api.manifest.rollout_job import API_VERSION, PLURAL, RolloutJob
from rollout_api.manifest.runtime import RUNTIME_PLURALS
from rollout_api.redis_client.address import parse_address
from rollout_worker.doctor.cluster.api import ApiError, ClusterApi, ClusterUnreachableError, current_namespace
from rollout_worker.doctor.cluster.crd_digests import CRD_DIGESTS
from rollout_worker.doctor.cluster.installation import (
    OPERATOR_SELECTOR,
    judge_admission_policy,
    judge_crd,
    judge_lease,
    judge_monitoring,
    judge_operator,
    judge_served_api,
    judge_version,
    lease_of,
    serves,
)
from rollout_worker.doctor.cluster.namespace import (
    judge_namespace,
    judge_priority_class,
    judge_quotas,
    judge_worker_memory,
    pod_needs,
)
from rollout_worker.doctor.cluster.network import judge_dns, judge_name, judge_network_policies, worker_labels
from rollout_worker.doctor.cluster.nodes import judge_claim, judge_nodes, judge_storage_classes
from rollout_worker.doctor.cluster.permissions import (
    USER_ACCESSES,
    Access,
    judge_operator_account,
    judge_user,
    operator_accesses,
)
from rollout_worker.doctor.findings import Finding, error, ok, warning

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_API_SERVER_NAME = "kubernetes.default.svc"
_FORBIDDEN, _NOT_FOUND = 403, 404


def examine_cluster(job: RolloutJob | None, namespace: str | None, own_version: str | None) -> list[Finding]:
    """Examine the cluster of the kubeconfig, or of this pod.

    Args:
        job: the manifest; None if there is none.
        namespace: namespace of jobs; None for that of the manifest, or else of the current context.
        own_version: version of das-rollout; None if it is unknown.
    """
    try:
        api = ClusterApi()
        version = judge_version(api.get("/version"))
        namespace = namespace or (job.metadata.namespace if job is not None else current_namespace())
        return [
            ok("API server", api.server),
            version,
            *_installation(api, namespace, own_version),
            *_access(api, namespace),
            *_namespace(api, job, namespace),
            *_infrastructure(api, job),
        ]
    except ClusterUnreachableError as failure:
        return [error("API server", "cannot be reached", str(failure))]
    except ApiError as failure:
        return [error("API server", str(failure), "check the user and the token of the kubeconfig")]


def _judged(check: str, examine: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Return what *examine* finds, or that the user may not read what it needs."""
    try:
        found = examine()
        return [found] if isinstance(found, Finding) else list(found)
    except ApiError as failure:
        return [_not_examined(check, failure)]


def _not_examined(check: str, failure: ApiError) -> Finding:
    if failure.status == _FORBIDDEN:
        advice = "run this as a user who may read it, such as an administrator"
    else:
        advice = "the API server cannot answer this; see its log"
    return warning(check, f"not examined: {failure}", advice)


def _optional(api: ClusterApi, path: str) -> dict[str, Any] | None:
    """Return an object; None if it does not exist."""
    try:
        return api.get(path)
    except ApiError as failure:
        if failure.status == _NOT_FOUND:
            return None
        raise


def _installation(api: ClusterApi, namespace: str, own_version: str | None) -> list[Finding]:
    findings = _judged("CRDs", lambda: _crds(api))
    try:
        deployments = api.items("/apis/apps/v1/deployments", labelSelector=OPERATOR_SELECTOR)
    except ApiError as failure:
        findings.append(_not_examined("operator", failure))
    else:
        findings += judge_operator(deployments, namespace, own_version)
        for deployment in deployments:
            if serves(deployment, namespace):
                findings += _judged("leader", partial(_lease, api, deployment))
                findings += _judged("operator's permissions", partial(_account, api, deployment, namespace))
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    # Kubernetes has such policies since version 1.30.
    findings += _judged(
        "pod templates", lambda: judge_admission_policy((_optional(api, policies) or {}).get("items", ()))
    )
    findings += _judged("monitoring", lambda: judge_monitoring(api.get("/apis")["groups"]))
    return findings


def _crds(api: ClusterApi) -> list[Finding]:
    try:
        return [judge_crd(name, _optional(api, f"{_CRDS}/{name}")) for name in CRD_DIGESTS]
    except ApiError as failure:
        if failure.status != _FORBIDDEN:
            raise
    return judge_served_api(_optional(api, f"/apis/{API_VERSION}"), (PLURAL, *RUNTIME_PLURALS.values()))


def _lease(api: ClusterApi, deployment: Mapping[str, Any]) -> list[Finding]:
    reference = lease_of(deployment)
    if reference is None:  # a single replica without an election
        return []
    namespace, name = reference
    lease = _optional(api, f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    return [judge_lease(f"{namespace}/{name}", lease, datetime.now(UTC))]


def _account(api: ClusterApi, deployment: Mapping[str, Any], namespace: str) -> Finding:
    """Ask what the ServiceAccount of an operator may do in the namespace of jobs."""
    account = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
    user = f"system:serviceaccount:{deployment['metadata']['namespace']}:{account}"

    def is_denied(access: Access) -> bool:
        spec = {"user": user, "resourceAttributes": access.attributes(namespace)}
        return not api.review("SubjectAccessReview", spec)

    return judge_operator_account(user, [one for one in operator_accesses() if is_denied(one)], namespace)


def _access(api: ClusterApi, namespace: str) -> list[Finding]:
    def is_denied(access: Access) -> bool:
        return not api.review("SelfSubjectAccessReview", {"resourceAttributes": access.attributes(namespace)})

    return _judged("your permissions", lambda: judge_user([one for one in USER_ACCESSES if is_denied(one)], namespace))


def _namespace(api: ClusterApi, job: RolloutJob | None, namespace: str) -> list[Finding]:
    core = f"/api/v1/namespaces/{namespace}"
    spec = job.spec if job is not None else None
    uses_templates = spec is not None and bool(spec.workers.pod_template or spec.head.pod_template)
    findings = _judged(
        "Pod Security", lambda: judge_namespace(namespace, _optional(api, core), uses_templates=uses_templates)
    )
    findings += _judged(
        "quotas",
        lambda: judge_quotas(
            api.items(f"{core}/resourcequotas"),
            api.items(f"{core}/limitranges"),
            pod_needs(job) if job is not None else [],
        ),
    )
    policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    labels = worker_labels(job.metadata.name if job is not None else "any")
    findings += _judged(
        "NetworkPolicies", lambda: judge_network_policies(api.items(policies), labels, _redis_port(job))
    )
    if job is not None and job.spec.runtime_ref is None:
        findings += [judge_worker_memory(pods) for pods in pod_needs(job) if pods.component == "worker"]
    if spec is not None:
        for claim in dict.fromkeys(
            name
            for name in (spec.model.cache.persistent_volume_claim, spec.weights.persistent_volume_claim)
            if name is not None
        ):
            findings += _judged(f"claim {claim}", partial(_claim, api, core, claim))
        if (name := spec.priority_class_name) is not None:
            path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}"
            findings += _judged("PriorityClass", lambda: judge_priority_class(name, _optional(api, path)))
    return findings


def _claim(api: ClusterApi, namespace_path: str, name: str) -> Finding:
    return judge_claim(name, _optional(api, f"{namespace_path}/persistentvolumeclaims/{name}"))


def _redis_port(job: RolloutJob | None) -> int | None:
    if job is None or job.spec.redis.url is None:
        return None
    hosts = parse_address(job.spec.redis.url).hosts
    return hosts[0][1] if hosts else None


def _infrastructure(api: ClusterApi, job: RolloutJob | None) -> list[Finding]:
    workers = job.spec.workers if job is not None else None
    findings = _judged("nodes", lambda: judge_nodes(api.items("/api/v1/nodes"), workers))
    findings += _judged(
        "storage class", lambda: judge_storage_classes(api.items("/apis/storage.k8s.io/v1/storageclasses"))
    )
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return [*findings, judge_name(_API_SERVER_NAME, _lookup_failure(_API_SERVER_NAME))]
    pods = "/api/v1/namespaces/kube-system/pods"
    return findings + _judged("DNS", lambda: judge_dns(api.items(pods, labelSelector="k8s-app=kube-dns")))


def _lookup_failure(name: str) -> str:
    try:
        socket.getaddrinfo(name, 443)
    except OSError as failure:
        return str(failure)
    return ""
