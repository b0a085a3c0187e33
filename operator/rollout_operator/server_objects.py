"""Builds the manifests of a job's HTTP server; pure functions of the job."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rollout_api.manifest.status import ServerStatus
from rollout_operator import names
from rollout_operator.job_context import JobContext
from rollout_operator.observed import Observed
from rollout_operator.owned_objects import owned_object
from rollout_operator.pods import server_pod

DEPLOYMENT = "Deployment"
"""Kind of the object that runs the server."""


def server_objects(context: JobContext) -> list[dict[str, Any]]:
    """Return the Deployment, the Service and the NetworkPolicy of the server; nothing if the job has none.

    Raises:
        PatchError: if the pod template cannot be merged.
    """
    if (server := context.job.spec.server) is None:
        return []
    name = names.server(context.name)
    selector = names.selector(context.name, names.SERVER)
    pod = server_pod(context, server)
    deployment = owned_object(context, "apps/v1", DEPLOYMENT, name, names.SERVER) | {
        "spec": {
            "replicas": server.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {field: pod["metadata"][field] for field in ("labels", "annotations")},
                "spec": pod["spec"],
            },
        }
    }
    # The API server writes some quantities in another way, so that the Deployment differs from what was applied.
    content = json.dumps(deployment, sort_keys=True).encode()
    deployment["metadata"]["annotations"] = {names.CONTENT_HASH_ANNOTATION: hashlib.sha256(content).hexdigest()[:16]}
    service = owned_object(context, "v1", "Service", name, names.SERVER) | {
        "spec": {
            "selector": selector,
            "ports": [{"name": "http", "port": names.SERVER_PORT, "targetPort": "http", "protocol": "TCP"}],
        }
    }
    clients: dict[str, Any] = {"ports": [{"port": names.SERVER_PORT, "protocol": "TCP"}]}
    if server.tokens_secret_name is None:
        clients["from"] = [{"podSelector": {}}]
    policy = owned_object(context, "networking.k8s.io/v1", "NetworkPolicy", name, names.SERVER) | {
        "spec": {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": [clients]}
    }
    return [deployment, service, policy]


def server_status(context: JobContext, observed: Observed) -> ServerStatus | None:
    """Return how many pods the server has; None if the job has no server."""
    if (server := context.job.spec.server) is None:
        return None
    status = observed.objects.get((DEPLOYMENT, names.server(context.name)), {}).get("status", {})
    return ServerStatus(replicas=server.replicas, ready=status.get("readyReplicas", 0))
