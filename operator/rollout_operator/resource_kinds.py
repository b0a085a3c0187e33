"""The kinds of objects that the operator lists and watches."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION
from rollout_api.manifest.runtime import CLUSTER_RUNTIME_KIND, RUNTIME_KIND, RUNTIME_PLURALS
from rollout_operator.gang import GANG_KIND, GANG_PLURAL


@dataclass(frozen=True)
class ResourceKind:
    """One kind of object."""

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The value of ``apiVersion`` in manifests of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version


ROLLOUT_JOBS = ResourceKind(KIND, GROUP, VERSION, PLURAL)
CLUSTER_RUNTIMES, RUNTIMES = (
    ResourceKind(kind, GROUP, VERSION, RUNTIME_PLURALS[kind]) for kind in (CLUSTER_RUNTIME_KIND, RUNTIME_KIND)
)


def owned_kinds(disruption_budget_api: str | None, gang_api: str | None = None) -> list[ResourceKind]:
    """Return the kinds that jobs own on a cluster with these API versions of optional kinds, if it has them."""
    kinds = [
        ResourceKind("Pod", "", "v1", "pods"),
        ResourceKind("ServiceAccount", "", "v1", "serviceaccounts"),
        ResourceKind("ConfigMap", "", "v1", "configmaps"),
        ResourceKind("Service", "", "v1", "services"),
        ResourceKind("Deployment", "apps", "v1", "deployments"),
        ResourceKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    ]
    if disruption_budget_api is not None:
        group, _, version = disruption_budget_api.partition("/")
        kinds.append(ResourceKind("PodDisruptionBudget", group, version, "poddisruptionbudgets"))
    if gang_api is not None:
        group, _, version = gang_api.partition("/")
        kinds.append(ResourceKind(GANG_KIND, group, version, GANG_PLURAL))
    return kinds
