"""Runtimes: the kinds ``ClusterRolloutRuntime`` and ``RolloutRuntime``, by which a platform team describes a cluster.

The ``spec`` of a runtime has those settings of a RolloutJob that depend on the cluster and not on the training. A job
names a runtime in ``spec.runtimeRef``; what the job sets itself takes precedence.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_api.manifest.field_types import DnsName, ManifestModel

CLUSTER_RUNTIME_KIND = "ClusterRolloutRuntime"
RUNTIME_KIND = "RolloutRuntime"
RUNTIME_PLURALS = {CLUSTER_RUNTIME_KIND: "clusterrolloutruntimes", RUNTIME_KIND: "rolloutruntimes"}
"""The kinds of runtimes, and their plurals in URLs of the API server."""

SCALING_FIELDS = frozenset(
    {"replicas", "min_replicas", "max_replicas", "autoscale", "idle_seconds", "max_pending_replacements"}
)
"""Fields of ``workers`` that concern the number of workers, not their pods. Each job sets them itself."""


RUNTIME_SECTIONS = ("image", "head", "priority_class_name")
"""Sections of a job that a runtime may set as a whole. Of ``workers`` and ``model``, it may set only a part."""


class RuntimeRef(ManifestModel):
    """The runtime from which a job takes what it does not set itself. ``rollout run`` ignores it."""

    name: DnsName = Field(description="Name of the runtime.")
    kind: Literal["ClusterRolloutRuntime", "RolloutRuntime"] = Field(
        default="ClusterRolloutRuntime",
        description="Kind of the runtime; a RolloutRuntime is in the namespace of the job.",
    )
