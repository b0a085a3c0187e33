"""The kinds of objects that the operator lists and watches."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION


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


def owned_kinds(disruption_budget_api: str | None) -> list[ResourceKind]:
    """Return the kinds that jobs own on a cluster with this API version of PodDisruptionBudgets, if it has any."""
    kinds = [
        ResourceKind("Pod", "", "v1", "pods"),
        ResourceKind("ServiceAccount", "", "v1", "serviceaccounts"),
        ResourceKind("ConfigMap", "", "v1", "configmaps"),
        ResourceKind("Service", "", "v1", "services"),
        ResourceKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    ]
    if disruption_budget_api is not None:
        group, _, version = disruption_budget_api.partition("/")
        kinds.append(ResourceKind("PodDisruptionBudget", group, version, "poddisruptionbudgets"))
    return kinds
