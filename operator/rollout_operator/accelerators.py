"""Node affinity for a kind of GPU."""

from __future__ import annotations

from typing import Any

from rollout_api.manifest.accelerators import accelerator_labels


def node_affinity(kind: str) -> dict[str, Any]:
    """Return a ``nodeAffinity`` that accepts nodes on which any label names this kind of GPU.

    See :func:`rollout_api.manifest.accelerators.accelerator_labels`.
    """
    labels = accelerator_labels(kind)
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": values}]} for key, values in labels.items()]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
