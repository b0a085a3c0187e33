"""What a job owns besides pods, as dicts: pure functions of the job."""

from __future__ import annotations

import json
from typing import Any

from rollout_api.manifest.rollout_job import API_VERSION, KIND
from rollout_api.manifest.status import Connection
from rollout_api.protocol.keys import MessageKeys
from rollout_operator import names
from rollout_operator.cluster import Cluster
from rollout_operator.pods import MANIFEST_FILE, WEIGHTS_MOUNT, JobIdentity, redis_secret


def connection(identity: JobIdentity) -> Connection:
    """How trainers connect."""
    job = identity.job
    secret, history = redis_secret(job), job.spec.history.redis
    history_secret = None if history.url_from is None else history.url_from.secret_key_ref
    return Connection(
        uid=identity.uid,
        key_prefix=MessageKeys(identity.uid).prefix,
        secret_name=secret.name if secret is not None else None,
        secret_key=secret.key if secret is not None else None,
        url=job.spec.redis.url if secret is None else None,
        history_secret_name=history_secret.name if history_secret is not None else None,
        history_secret_key=history_secret.key if history_secret is not None else None,
        history_url=history.url,
    )


def objects(identity: JobIdentity, cluster: Cluster) -> list[dict[str, Any]]:
    """All of them, in the order in which they are needed."""
    made = [
        _service_account(identity),
        _manifest(identity),
        _connection(identity),
        _service(identity),
        _network_policy(identity, cluster),
    ]
    if cluster.disruption_budgets is not None:
        made.append(_disruption_budget(identity, cluster.disruption_budgets))
    return made


def _object(identity: JobIdentity, api_version: str, kind: str, name: str, component: str) -> dict[str, Any]:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": identity.job.metadata.namespace,
            "labels": names.labels(identity.name, component),
            "ownerReferences": [identity.owner],
        },
    }


def _service_account(identity: JobIdentity) -> dict[str, Any]:
    account = _object(identity, "v1", "ServiceAccount", names.service_account(identity.name), "pods")
    return {**account, "automountServiceAccountToken": False}


def _manifest(identity: JobIdentity) -> dict[str, Any]:
    """The job as its pods read it: without what is about pods, and as ``rollout head`` takes it."""
    job = identity.job
    spec = job.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        exclude={
            **dict.fromkeys(("head", "image", "priority_class_name", "managed_by", "redis"), True),
            "history": {"redis"},
        },
    )
    spec.pop("lifecycle", None)
    # how many workers there are changes while the job runs; its head must know only with how many it may begin
    workers = spec.setdefault("workers", {})
    for name in ("maxReplicas", "autoscale", "podTemplate"):
        workers.pop(name, None)
    workers["replicas"] = workers["minReplicas"] = job.spec.workers.least
    if job.spec.weights.persistent_volume_claim is not None:
        weights = spec.setdefault("weights", {})
        weights["allowedRoots"] = [*weights.get("allowedRoots", []), WEIGHTS_MOUNT]
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        "spec": spec,
    }
    made = _object(identity, "v1", "ConfigMap", names.manifest_map(identity.name), "manifest")
    # JSON is YAML, and has one way to write it
    return {**made, "data": {MANIFEST_FILE: json.dumps(manifest, indent=1, sort_keys=True)}}


def _connection(identity: JobIdentity) -> dict[str, Any]:
    about = connection(identity).model_dump(by_alias=True, exclude_none=True)
    about |= {"namespace": identity.job.metadata.namespace, "name": identity.name}
    made = _object(identity, "v1", "ConfigMap", names.connection_map(identity.name), "connection")
    return {**made, "data": about}


def _service(identity: JobIdentity) -> dict[str, Any]:
    service = _object(identity, "v1", "Service", names.service(identity.name), names.HEAD)
    spec = {
        "selector": names.selector(identity.name, names.HEAD),
        "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return {**service, "spec": spec}


def _disruption_budget(identity: JobIdentity, api_version: str) -> dict[str, Any]:
    """One worker at a time: a drained node's rollouts go on elsewhere, and as few as possible wait."""
    budget = _object(identity, api_version, "PodDisruptionBudget", names.disruption_budget(identity.name), names.WORKER)
    selector = {"matchLabels": names.selector(identity.name, names.WORKER)}
    return {**budget, "spec": {"maxUnavailable": 1, "selector": selector}}


def _network_policy(identity: JobIdentity, cluster: Cluster) -> dict[str, Any]:
    """Pods of the job talk to each other on any port; /status and /metrics are for the operator and for monitoring.

    Ray's ports are chosen freely and its token does not encrypt, so nobody else gets to them. Where Redis, a model hub
    and the trainer's broadcasts are is not known here: what pods may call is not limited.
    """
    policy = _object(identity, "networking.k8s.io/v1", "NetworkPolicy", names.network_policy(identity.name), "pods")
    watching: dict[str, Any] = {"ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]}
    if cluster.watcher_namespaces:
        watching["from"] = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
            for namespace in cluster.watcher_namespaces
        ]
    pods = {"matchLabels": names.selector(identity.name)}
    ingress = [{"from": [{"podSelector": pods}]}, watching]
    return {**policy, "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}}
