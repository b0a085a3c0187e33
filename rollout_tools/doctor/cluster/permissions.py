"""The accesses that users of jobs and the operator need, and judgements of what is denied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollout_api.manifest.rollout_job import GROUP, PLURAL
from rollout_tools.doctor.findings import Finding, error, ok


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
"""What a person needs in the namespace of their jobs."""

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
}
"""The rules of the chart's template ``das-rollout.rules``; a test compares them."""


def operator_accesses() -> Iterator[Access]:
    """Yield what the operator needs in each namespace of jobs."""
    for (group, resource), verbs in _OPERATOR_VERBS.items():
        for verb in verbs.split():
            yield Access(verb, group, resource)


def judge_user(denied: Sequence[Access], namespace: str) -> Finding:
    """Judge what the current user may not do."""
    if denied:
        return error(
            "your permissions",
            f"denied in {namespace}: {', '.join(map(str, denied))}",
            "ask an administrator for the role edit there, with the chart's rbac.aggregateRoles=true",
        )
    return ok("your permissions", f"jobs may be created and changed in {namespace}")


def judge_operator_account(account: str, denied: Sequence[Access], namespace: str) -> Finding:
    """Judge what the operator's ServiceAccount may not do."""
    if denied:
        return error(
            "operator's permissions",
            f"{account} is denied in {namespace}: {', '.join(map(str, denied))}",
            "jobs of this namespace are not run; upgrade the chart's release, or add the namespace to "
            "operator.namespaces",
        )
    return ok("operator's permissions", f"{account} may do in {namespace} what jobs need")
