"""Kinds of objects that jobs own, which the operator watches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watched:
    """A kind of object that jobs own."""

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """As in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version


def watched(disruption_budgets: str | None) -> list[Watched]:
    """All kinds that jobs own on this cluster."""
    kinds = [
        Watched("Pod", "", "v1", "pods"),
        Watched("ServiceAccount", "", "v1", "serviceaccounts"),
        Watched("ConfigMap", "", "v1", "configmaps"),
        Watched("Service", "", "v1", "services"),
        Watched("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    ]
    if disruption_budgets is not None:
        group, _, version = disruption_budgets.partition("/")
        kinds.append(Watched("PodDisruptionBudget", group, version, "poddisruptionbudgets"))
    return kinds
