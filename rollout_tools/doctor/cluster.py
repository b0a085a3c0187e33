"""Examines a cluster: reads what each check needs, by kubectl. Nothing is changed."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError
from rollout_api.manifest.pod_spec import RUNTIME_PLURALS
from rollout_api.manifest.rollout_job import API_VERSION, PLURAL, RolloutJob
from rollout_api.redis_client.address import parse_address
from rollout_tools.doctor.crd_digests import CRD_DIGESTS
from rollout_tools.doctor.findings import Finding, error, ok, warning
from rollout_tools.doctor.installation import (
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
    lease_of,
    operator_accesses,
    serves,
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

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_API_SERVER_NAME = "kubernetes.default.svc"
_FORBIDDEN, _NOT_FOUND = "Forbidden", "NotFound"
_TIMEOUT = "--request-timeout=10s"
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONTEXT = "jsonpath={.clusters[0].cluster.server} {.contexts[0].context.namespace}"
_API_ERROR = re.compile(r"^Error from server(?: \((\w+)\))?: (.*)", re.DOTALL | re.MULTILINE)


class ClusterError(RuntimeError):
    """A request has failed. The message says why."""

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason
        """What the API server has given as the reason, such as Forbidden or NotFound; empty if it has given none."""
        super().__init__(message)


class ClusterApi:
    """A cluster with the rights of the current context of the kubeconfig, or in a pod of its ServiceAccount."""

    def __init__(self) -> None:
        """Find the cluster; nothing is sent yet.

        Raises:
            ClusterError: if there is none, or kubectl is not installed.
        """
        self._kubectl = Kubectl()
        try:
            context = self._kubectl.run("config", "view", "--minify", "-o", _CONTEXT, capture_output=True, text=True)
        except PluginError as failure:
            raise ClusterError(str(failure)) from None
        if not context.returncode:
            self.server, _, namespace = str(context.stdout).partition(" ")
            self.namespace = namespace or "default"
            """Namespace of the current context, or of this pod."""
        elif _POD_NAMESPACE.exists():
            self.server = f"https://{os.environ.get('KUBERNETES_SERVICE_HOST')}"
            self.namespace = _POD_NAMESPACE.read_text().strip()
        else:
            raise ClusterError("there is no access to a cluster; set KUBECONFIG, or run this in a pod")

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object or a list.

        Raises:
            ClusterError: if the API server answers with an error, or not at all.
        """
        found: dict[str, Any] = json.loads(self._run("get", "--raw", f"{path}?{urlencode(query)}"))
        return found

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Return the objects of a list; see :meth:`get`."""
        found: list[dict[str, Any]] = self.get(path, **query)["items"]
        return found

    def review(self, kind: str, specs: Sequence[dict[str, Any]]) -> list[bool]:
        """Return for each access whether it is allowed.

        *kind* is SelfSubjectAccessReview or SubjectAccessReview.

        Raises:
            ClusterError: if the API server answers with an error, or not at all.
        """
        reviews = [{"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec} for spec in specs]
        body = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
        output = 'jsonpath={.status.allowed}{"\\n"}'
        answers = self._run("create", "-f", "-", "--validate=false", "-o", output, stdin=body)
        return [answer == "true" for answer in answers.splitlines()]

    def _run(self, *arguments: str, stdin: str = "") -> str:
        done = self._kubectl.run(*arguments, _TIMEOUT, input=stdin, capture_output=True, text=True)
        if not done.returncode:
            return str(done.stdout)
        message = str(done.stderr).strip()
        match = _API_ERROR.search(message)
        raise ClusterError(message) if match is None else ClusterError(match[2], match[1] or "")


def examine_cluster(job: RolloutJob | None, namespace: str | None, own_version: str | None) -> list[Finding]:
    """Examine the cluster of the kubeconfig, or of this pod.

    Jobs are in *namespace*; None stands for that of the manifest, or else of the current context.
    """
    try:
        api = ClusterApi()
        version = check_version(api.get("/version"))
    except ClusterError as failure:
        return [error("API server", "cannot be used", f"{failure}; check the kubeconfig, its user, and the network")]
    namespace = namespace or (job.metadata.namespace if job is not None else api.namespace)
    return [
        ok("API server", api.server),
        version,
        *_installation(api, namespace, own_version),
        *_access(api, namespace),
        *_namespace(api, job, namespace),
        *_infrastructure(api, job),
    ]


def _examined(check: str, examine: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Return what *examine* finds, or that the user may not read what it needs."""
    try:
        found = examine()
        return [found] if isinstance(found, Finding) else list(found)
    except ClusterError as failure:
        return [_not_examined(check, failure)]


def _not_examined(check: str, failure: ClusterError) -> Finding:
    if failure.reason == _FORBIDDEN:
        advice = "run this as a user who may read it, such as an administrator"
    else:
        advice = "the API server cannot answer this; see its log"
    return warning(check, f"not examined: {failure}", advice)


def _optional(api: ClusterApi, path: str) -> dict[str, Any] | None:
    """Return an object; None if it does not exist."""
    try:
        return api.get(path)
    except ClusterError as failure:
        if failure.reason == _NOT_FOUND:
            return None
        raise


def _installation(api: ClusterApi, namespace: str, own_version: str | None) -> list[Finding]:
    findings = _examined("CRDs", lambda: _crds(api))
    try:
        deployments = api.items("/apis/apps/v1/deployments", labelSelector=OPERATOR_SELECTOR)
    except ClusterError as failure:
        findings.append(_not_examined("operator", failure))
    else:
        findings += check_operator(deployments, namespace, own_version)
        for deployment in deployments:
            if serves(deployment, namespace):
                findings += _examined("leader", partial(_lease, api, deployment))
                findings += _examined("operator's permissions", partial(_account, api, deployment, namespace))
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    # Kubernetes has such policies since version 1.30.
    findings += _examined(
        "pod templates", lambda: check_admission_policy((_optional(api, policies) or {}).get("items", ()))
    )
    findings += _examined("monitoring", lambda: check_monitoring(api.get("/apis")["groups"]))
    return findings


def _crds(api: ClusterApi) -> list[Finding]:
    try:
        return [check_crd(name, _optional(api, f"{_CRDS}/{name}")) for name in CRD_DIGESTS]
    except ClusterError as failure:
        if failure.reason != _FORBIDDEN:
            raise
    return check_served_api(_optional(api, f"/apis/{API_VERSION}"), (PLURAL, *RUNTIME_PLURALS.values()))


def _lease(api: ClusterApi, deployment: Mapping[str, Any]) -> list[Finding]:
    reference = lease_of(deployment)
    if reference is None:  # a single replica without an election
        return []
    namespace, name = reference
    lease = _optional(api, f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    return [check_lease(f"{namespace}/{name}", lease, datetime.now(UTC))]


def _account(api: ClusterApi, deployment: Mapping[str, Any], namespace: str) -> Finding:
    """Ask what the ServiceAccount of an operator may do in the namespace of jobs."""
    account = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
    user = f"system:serviceaccount:{deployment['metadata']['namespace']}:{account}"
    denied = _denied(api, list(operator_accesses()), namespace, user=user)
    return check_operator_account(user, denied, namespace)


def _denied(api: ClusterApi, accesses: Sequence[Access], namespace: str, *, user: str = "") -> list[Access]:
    """Return what a user may not do in a namespace; without a name, what the current user may not do."""
    kind, of_user = ("SubjectAccessReview", {"user": user}) if user else ("SelfSubjectAccessReview", {})
    specs = [{**of_user, "resourceAttributes": access.attributes(namespace)} for access in accesses]
    return [access for access, is_allowed in zip(accesses, api.review(kind, specs), strict=True) if not is_allowed]


def _access(api: ClusterApi, namespace: str) -> list[Finding]:
    return _examined("your permissions", lambda: check_user(_denied(api, USER_ACCESSES, namespace), namespace))


def _namespace(api: ClusterApi, job: RolloutJob | None, namespace: str) -> list[Finding]:
    core = f"/api/v1/namespaces/{namespace}"
    spec = job.spec if job is not None else None
    uses_templates = spec is not None and bool(spec.workers.pod_template or spec.head.pod_template)
    findings = _examined(
        "Pod Security", lambda: check_namespace(namespace, _optional(api, core), uses_templates=uses_templates)
    )
    findings += _examined(
        "quotas",
        lambda: check_quotas(
            api.items(f"{core}/resourcequotas"),
            api.items(f"{core}/limitranges"),
            pod_needs(job) if job is not None else [],
        ),
    )
    policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    labels = worker_labels(job.metadata.name if job is not None else "any")
    findings += _examined(
        "NetworkPolicies", lambda: check_network_policies(api.items(policies), labels, _redis_port(job))
    )
    if job is not None and job.spec.runtime_ref is None:
        findings += [check_worker_memory(pods) for pods in pod_needs(job) if pods.component == "worker"]
    if spec is not None:
        for claim in dict.fromkeys(
            name
            for name in (spec.model.cache.persistent_volume_claim, spec.weights.persistent_volume_claim)
            if name is not None
        ):
            findings += _examined(f"claim {claim}", partial(_claim, api, core, claim))
        if (name := spec.priority_class_name) is not None:
            path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}"
            findings += _examined("PriorityClass", lambda: check_priority_class(name, _optional(api, path)))
    return findings


def _claim(api: ClusterApi, namespace_path: str, name: str) -> Finding:
    return check_claim(name, _optional(api, f"{namespace_path}/persistentvolumeclaims/{name}"))


def _redis_port(job: RolloutJob | None) -> int | None:
    if job is None or job.spec.redis.url is None:
        return None
    hosts = parse_address(job.spec.redis.url).hosts
    return hosts[0][1] if hosts else None


def _infrastructure(api: ClusterApi, job: RolloutJob | None) -> list[Finding]:
    workers = job.spec.workers if job is not None else None
    findings = _examined("nodes", lambda: check_nodes(api.items("/api/v1/nodes"), workers))
    findings += _examined(
        "storage class", lambda: check_storage_classes(api.items("/apis/storage.k8s.io/v1/storageclasses"))
    )
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return [*findings, check_name(_API_SERVER_NAME, _lookup_failure(_API_SERVER_NAME))]
    pods = "/api/v1/namespaces/kube-system/pods"
    return findings + _examined("DNS", lambda: check_dns(api.items(pods, labelSelector="k8s-app=kube-dns")))


def _lookup_failure(name: str) -> str:
    try:
        socket.getaddrinfo(name, 443)
    except OSError as failure:
        return str(failure)
    return ""
