"""The PodGroups of the coscheduling plugin, without its scheduler."""

from __future__ import annotations

from typing import Any

from rollout_operator.objects.names import COSCHEDULING_API, GANG_KIND, GANG_PLURAL

POD_GROUPS_GROUP, POD_GROUPS_VERSION = COSCHEDULING_API.split("/")
POD_GROUPS_PATH = f"/apis/{COSCHEDULING_API}/{GANG_PLURAL}"


def pod_groups_crd() -> dict[str, Any]:
    """Return a CustomResourceDefinition that accepts any content."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{GANG_PLURAL}.{POD_GROUPS_GROUP}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins"},
        },
        "spec": {
            "group": POD_GROUPS_GROUP,
            "scope": "Namespaced",
            "names": {"kind": GANG_KIND, "plural": GANG_PLURAL},
            "versions": [
                {
                    "name": POD_GROUPS_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
