"""Checks what of das-rollout is installed on a cluster: its API, the operator, and what it and users may do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rollout_api.manifest.rollout_job import GROUP, PLURAL, VERSION
from rollout_tools.doctor.crd_digests import CRD_DIGESTS
from rollout_tools.doctor.findings import Finding, error, error_if, ok, warning

MIN_KUBERNETES = (1, 29)
"""The chart's ``kubeVersion``: the rules of the CRDs compare quantities, which CEL can do since then."""
OPERATOR_SELECTOR = "app.kubernetes.io/name=das-rollout-operator"
"""Selects the objects of the operator that the chart creates."""
_UPGRADE = "upgrade the chart's release with crds.install=true, or run kubectl apply --server-side -f crds/"


def schema_digest(crd: Mapping[str, Any]) -> str:
    """Return a digest of the schemas of all versions of a CRD, whether they come from a file or an API server."""
    schemas = {version["name"]: version["schema"] for version in crd["spec"]["versions"]}
    return hashlib.sha256(json.dumps(_normalized(schemas), sort_keys=True).encode()).hexdigest()


def _normalized(value: Any) -> Any:
    """Return a value as the API server stores it: it writes 1.0 as 1, and leaves out empty ``properties``."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalized(item) for item in value]
    if isinstance(value, dict):
        return {name: _normalized(item) for name, item in value.items() if name != "properties" or item}
    return value


def check_version(version: Mapping[str, Any]) -> Finding:
    """Check the response of ``/version``."""
    numbers = tuple(int(re.sub(r"\D", "", str(version.get(part, "0"))) or 0) for part in ("major", "minor"))
    return error_if(
        numbers < MIN_KUBERNETES,
        "Kubernetes",
        str(version.get("gitVersion", "?")),
        f"the CRDs need Kubernetes {'.'.join(map(str, MIN_KUBERNETES))} or newer; upgrade the cluster",
    )


def check_crd(name: str, crd: Mapping[str, Any] | None) -> Finding:
    """Check a CustomResourceDefinition; None if the cluster has none of this name."""
    check = f"CRD {name.partition('.')[0]}"
    if crd is None:
        return error(check, "not installed", "install the chart with crds.install=true, or run kubectl apply -f crds/")
    served = [version["name"] for version in crd["spec"]["versions"] if version.get("served")]
    seen = f"versions {', '.join(served)}"
    if VERSION not in served:
        return error(check, seen, f"the version {VERSION} is missing; {_UPGRADE}")
    established = [one for one in crd.get("status", {}).get("conditions", ()) if one["type"] == "Established"]
    if not any(one["status"] == "True" for one in established):
        return error(check, f"{seen}, not established", "see its conditions with kubectl describe crd")
    if schema_digest(crd) != CRD_DIGESTS[name]:
        return warning(
            check,
            f"{seen}, of another release than this command's",
            "the API server rejects or drops fields that it does not know; " + _UPGRADE,
        )
    return ok(check, f"{seen}, the schema of this release")


def check_served_api(resource_list: Mapping[str, Any] | None, names: Sequence[str]) -> list[Finding]:
    """Check what the API server serves, for users who may not read CRDs.

    *resource_list* is the response of ``/apis/das.rollout.dev/v1beta1``, if there is one, and *names* are the plural
    names of the kinds that jobs need.
    """
    served = {one["name"] for one in (resource_list or {}).get("resources", ())}
    missing = [name for name in names if name not in served]
    if missing:
        return [error("CRDs", f"{', '.join(missing)} not served", "ask an administrator to install the chart")]
    return [warning("CRDs", "served, but this user may not read their schemas", "ask an administrator to compare them")]


def check_operator(deployments: Sequence[Mapping[str, Any]], namespace: str, own_version: str | None) -> list[Finding]:
    """Check the Deployments of the operator.

    *deployments* are those with the operator's labels in all namespaces, and *namespace* is that of jobs.
    """
    if not deployments:
        return [
            error("operator", "not installed", "install the chart, charts/das-rollout; nothing runs jobs without it")
        ]
    findings = [_check_deployment(one, own_version) for one in deployments if serves(one, namespace)]
    if findings:
        return findings
    names = ", ".join(_full_name(one) for one in deployments)
    return [
        error(
            "operator",
            f"{names} runs no jobs of the namespace {namespace}",
            "add the namespace to operator.namespaces of the chart, or create jobs in another one",
        )
    ]


def _check_deployment(deployment: Mapping[str, Any], own_version: str | None) -> Finding:
    version = (deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "?")
    ready = deployment.get("status", {}).get("readyReplicas", 0)
    replicas = deployment["spec"].get("replicas", 1)
    seen = f"{_full_name(deployment)}, version {version}, {ready} of {replicas} replicas ready"
    if not ready:
        namespace = deployment["metadata"]["namespace"]
        return error("operator", seen, f"see kubectl logs -n {namespace} -l {OPERATOR_SELECTOR}")
    if own_version is not None and version not in ("?", own_version):
        return warning("operator", seen, f"this command is version {own_version}; upgrade the older of the two")
    return ok("operator", seen)


def _full_name(deployment: Mapping[str, Any]) -> str:
    return f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"


def serves(deployment: Mapping[str, Any], namespace: str) -> bool:
    """Return whether an operator runs the jobs of a namespace, unless it selects namespaces by their labels."""
    named = list(_values(deployment, "--namespace="))
    return not named or namespace in named


def lease_of(deployment: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the namespace and the name of the Lease that the operator's replicas compete for."""
    for value in _values(deployment, "--lease="):
        namespace, _, name = value.partition("/")
        return namespace, name
    return None


def _values(deployment: Mapping[str, Any], option: str) -> Iterator[str]:
    """Yield the values of an option in the arguments of the operator's container."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        for argument in container.get("args", ()):
            if argument.startswith(option):
                yield argument.removeprefix(option)


def check_lease(name: str, lease: Mapping[str, Any] | None, now: datetime) -> Finding:
    """Check the Lease of the operator, which its leader renews.

    *name* has its namespace, *lease* is None if it does not exist, and *now* has a time zone.
    """
    advice = "no operator acts on jobs; see the operator's log, and whether the clock of this machine is right"
    spec = (lease or {}).get("spec", {})
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return error("leader", f"nobody holds the Lease {name}", advice)
    age = now - datetime.fromisoformat(spec["renewTime"])
    seen = f"{spec['holderIdentity']} has renewed the Lease {name} {max(0, age.total_seconds()):.0f} s ago"
    return error_if(age > timedelta(seconds=spec.get("leaseDurationSeconds", 0)), "leader", seen, advice)


def check_admission_policy(policies: Sequence[Mapping[str, Any]]) -> Finding:
    """Check whether the chart's policy for pod templates is installed, which is optional."""
    found = [one["metadata"]["name"] for one in policies if _belongs_to_chart(one)]
    if found:
        return ok("pod templates", f"{', '.join(found)} rejects jobs whose podTemplate raises their privileges")
    return ok("pod templates", "not restricted beyond Pod Security (admissionPolicy.restrictPodTemplates)")


def _belongs_to_chart(policy: Mapping[str, Any]) -> bool:
    labels = policy["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/part-of") == "das-rollout"


def check_monitoring(groups: Sequence[Mapping[str, Any]]) -> Finding:
    """Check whether the Prometheus operator is installed, which is optional.

    *groups* are the API groups that the API server serves.
    """
    if any(group["name"] == "monitoring.coreos.com" for group in groups):
        return ok("monitoring", "the Prometheus operator's API is served, so monitoring.podMonitor can be used")
    return ok("monitoring", "no Prometheus operator; leave monitoring.podMonitor and alerts of the chart disabled")


@dataclass(frozen=True)
class Access:
    """A verb on a kind of objects."""

    verb: str
    group: str
    resource: str
    """Plural name, with a subresource after a slash."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")

    def attributes(self, namespace: str) -> dict[str, str]:
        """Return the ``resourceAttributes`` of an access review."""
        resource, _, subresource = self.resource.partition("/")
        return {
            "namespace": namespace,
            "verb": self.verb,
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
        }


USER_ACCESSES = tuple(Access(verb, GROUP, PLURAL) for verb in ("create", "get", "list", "watch", "patch", "delete"))
"""The permissions of a person in the namespace of their jobs."""

_OPERATOR_VERBS: Mapping[tuple[str, str], str] = {
    (GROUP, "rolloutjobs"): "list watch patch delete",
    (GROUP, "clusterrolloutruntimes"): "list watch",
    (GROUP, "rolloutruntimes"): "list watch",
    (GROUP, "rolloutjobs/status"): "patch",
    (GROUP, "rolloutjobs/finalizers"): "update",
    ("", "pods"): "get list watch create delete",
    ("", "pods/status"): "patch",
    ("", "pods/log"): "get",
    ("", "configmaps"): "get list watch create patch",
    ("", "serviceaccounts"): "get list watch create patch",
    ("", "services"): "get list watch create patch delete",
    ("apps", "deployments"): "get list watch create patch delete",
    ("networking.k8s.io", "networkpolicies"): "get list watch create patch delete",
    ("policy", "poddisruptionbudgets"): "get list watch create patch",
    ("", "events"): "list create",
    ("kueue.x-k8s.io", "workloads"): "delete",
    ("scheduling.x-k8s.io", "podgroups"): "get list watch create patch",
    ("scheduling.volcano.sh", "podgroups"): "get list watch create patch",
    ("scheduling.k8s.io", "podgroups"): "get list watch create patch",
}
"""The rules of the chart's template ``das-rollout.rules``; a test compares them."""


def operator_accesses() -> Iterator[Access]:
    """Yield what the operator needs in each namespace of jobs."""
    for (group, resource), verbs in _OPERATOR_VERBS.items():
        for verb in verbs.split():
            yield Access(verb, group, resource)


def check_user(denied: Sequence[Access], namespace: str) -> Finding:
    """Check what the current user may not do."""
    if denied:
        return error(
            "your permissions",
            f"denied in {namespace}: {', '.join(map(str, denied))}",
            "ask an administrator for the role edit there, with the chart's rbac.aggregateRoles=true",
        )
    return ok("your permissions", f"jobs may be created and changed in {namespace}")


def check_operator_account(account: str, denied: Sequence[Access], namespace: str) -> Finding:
    """Check what the operator's ServiceAccount may not do."""
    if denied:
        return error(
            "operator's permissions",
            f"{account} is denied in {namespace}: {', '.join(map(str, denied))}",
            "jobs of this namespace are not run; upgrade the chart's release, or add the namespace to "
            "operator.namespaces",
        )
    return ok("operator's permissions", f"{account} may do in {namespace} what jobs need")
