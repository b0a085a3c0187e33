"""Builds the manifests of the objects that a job owns, except for its pods, and says which differ from them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_api.manifest.rollout_job import API_VERSION, KIND, FieldError, ManifestError
from rollout_api.manifest.status import Connection, ServerStatus
from rollout_api.protocol.keys import MessageKeys
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import ClusterInfo, Observed
from rollout_operator.objects.pods import MANIFEST_FILE, WEIGHTS_MOUNT, head_pod, server_pod, worker_pod
from rollout_operator.objects.strategic_merge import PatchError

DEPLOYMENT = "Deployment"
"""Kind of the object that runs the server."""


def connection(context: JobContext) -> Connection:
    """Return how trainers connect to the job."""
    job = context.job
    secret, history = context.redis_secret, job.spec.history.redis
    history_secret = None if history.url_from is None else history.url_from.secret_key_ref
    return Connection(
        uid=context.uid,
        key_prefix=MessageKeys(context.uid).prefix,
        secret_name=secret.name if secret is not None else None,
        secret_key=secret.key if secret is not None else None,
        url=job.spec.redis.url if secret is None else None,
        history_secret_name=history_secret.name if history_secret is not None else None,
        history_secret_key=history_secret.key if history_secret is not None else None,
        history_url=history.url,
        server_url=_server_url(context),
    )


def _server_url(context: JobContext) -> str | None:
    """Return the URL of the HTTP server within the cluster; None if the job has none."""
    if (server := context.job.spec.server) is None:
        return None
    scheme = "http" if server.tls_secret_name is None else "https"
    return f"{scheme}://{names.server(context.name)}.{context.job.metadata.namespace}.svc:{names.SERVER_PORT}"


def owned_objects(context: JobContext, cluster: ClusterInfo, *, workers: int) -> list[dict[str, Any]]:
    """Return all objects except for pods and the disruption budget, in the order of their creation.

    *workers* is the desired number of workers.
    """
    objects = [
        _service_account(context),
        _manifest(context),
        _connection(context),
        _service(context),
        _network_policy(context, cluster),
    ]
    if context.gang_api is not None:
        objects += [_gang(context, context.gang_api, slot) for slot in range(workers)]
    return objects


def cleanup_objects(context: JobContext, cluster: ClusterInfo) -> list[dict[str, Any]]:
    """Return the objects without which the cleanup pod cannot be created, start or connect to Redis."""
    return [_service_account(context), _manifest(context), _network_policy(context, cluster)]


def owned_object(context: JobContext, api_version: str, kind: str, name: str, component: str) -> dict[str, Any]:
    """Return an object that belongs to the job, without its content."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": context.job.metadata.namespace,
            "labels": names.labels(context.name, component),
            "ownerReferences": [context.owner_reference],
        },
    }


def _service_account(context: JobContext) -> dict[str, Any]:
    account = owned_object(context, "v1", "ServiceAccount", names.service_account(context.name), "pods")
    return {**account, "automountServiceAccountToken": False}


def _manifest(context: JobContext) -> dict[str, Any]:
    """Return the ConfigMap with the manifest that ``rollout head`` and ``rollout worker`` read.

    It lacks the fields that only concern the pods themselves.
    """
    job = context.job
    spec = job.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        exclude={
            **dict.fromkeys(("head", "server", "image", "priority_class_name", "managed_by", "redis"), True),
            "history": {"redis"},
            "weights": {"trainer_pods", "trainer_namespace"},
        },
    )
    spec.pop("lifecycle", None)
    # The number of workers, which changes while the job runs, is not the pods' concern.
    workers = spec.get("workers", {})
    for name in ("replicas", "minReplicas", "maxReplicas", "autoscale", "podTemplate"):
        workers.pop(name, None)
    if job.spec.weights.persistent_volume_claim is not None:
        weights = spec.setdefault("weights", {})
        weights["allowedRoots"] = [*weights.get("allowedRoots", []), WEIGHTS_MOUNT]
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        "spec": spec,
    }
    config_map = owned_object(context, "v1", "ConfigMap", names.manifest_config_map(context.name), "manifest")
    # JSON is valid YAML and, with sorted keys, has a canonical form, so that unchanged manifests compare equal.
    return {**config_map, "data": {MANIFEST_FILE: json.dumps(manifest, indent=1, sort_keys=True)}}


def _connection(context: JobContext) -> dict[str, Any]:
    data = connection(context).model_dump(by_alias=True, exclude_none=True)
    data |= {"namespace": context.job.metadata.namespace, "name": context.name}
    config_map = owned_object(context, "v1", "ConfigMap", names.connection_config_map(context.name), "connection")
    return {**config_map, "data": data}


def _service(context: JobContext) -> dict[str, Any]:
    service = owned_object(context, "v1", "Service", names.service(context.name), names.HEAD)
    spec = {
        "selector": names.selector(context.name, names.HEAD),
        "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return {**service, "spec": spec}


def disruption_budget(context: JobContext, cluster: ClusterInfo, api_version: str, num_expected: int) -> dict[str, Any]:
    """Return a budget that lets drains evict one pod at a time, so that the other workers can take over its rollouts.

    The disruption controller would compare ``maxUnavailable`` with the job's ``spec.workers.replicas``, which
    autoscaling does not change, and which counts workers that no node has room for. The budget therefore states how
    many of *num_expected* pods must remain. Pods that are not ready hold no rollouts and may always be evicted.
    """
    budget = owned_object(context, api_version, "PodDisruptionBudget", names.disruption_budget(context.name), "pods")
    selector = {
        "matchLabels": names.selector(context.name),
        "matchExpressions": [
            {"key": names.COMPONENT_LABEL, "operator": "In", "values": [names.HEAD, names.WORKER]},
        ],
    }
    spec: dict[str, Any] = {"minAvailable": max(0, num_expected - 1), "selector": selector}
    if cluster.has_unhealthy_pod_eviction_policy:
        spec["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    return {**budget, "spec": spec}


def _gang(context: JobContext, api_version: str, slot: int) -> dict[str, Any]:
    """Return the PodGroup of the worker in a slot, whose pods a scheduler then starts together."""
    gang = owned_object(context, api_version, names.GANG_KIND, context.gang(slot), "pods")
    if api_version != names.NATIVE_GANG_API:
        return {**gang, "spec": {"minMember": context.pods_per_worker}}
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": context.pods_per_worker}}}
    if (priority := context.job.spec.priority_class_name) is not None:
        spec["priorityClassName"] = priority
    return {**gang, "spec": spec}


def _network_policy(context: JobContext, cluster: ClusterInfo) -> dict[str, Any]:
    """Return a policy that admits the job's own pods and the trainer's on all ports, and readers of the status on one.

    When weights are broadcast or sent from the trainer's memory, collective operations choose their ports freely, and
    either side may connect to the other. Egress is limited only if the operator was told where Redis and the model hub
    are.
    """
    policy = owned_object(context, "networking.k8s.io/v1", "NetworkPolicy", names.network_policy(context.name), "pods")
    readers: dict[str, Any] = {"ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]}
    if cluster.status_reader_namespaces:
        readers["from"] = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
            for namespace in cluster.status_reader_namespaces
        ]
    pods = {"matchLabels": names.selector(context.name)}
    trainer = _trainer_pods(context)
    ingress = [{"from": [{"podSelector": pods}, *trainer]}, readers]
    if cluster.egress_rules is None:
        return {**policy, "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}}
    egress = [{"to": [{"podSelector": {}}, *trainer]}, *cluster.egress_rules]
    spec = {"podSelector": pods, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return {**policy, "spec": spec}


def _trainer_pods(context: JobContext) -> list[dict[str, Any]]:
    """Return the peers of a NetworkPolicy that are the trainer's pods; none if they send no weights."""
    weights = context.job.spec.weights
    if weights.transfer == "none":
        return []
    peer: dict[str, Any] = {"podSelector": {"matchLabels": weights.trainer_pods or {names.TRAINER_LABEL: context.name}}}
    if weights.trainer_namespace is not None:
        peer["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": weights.trainer_namespace}}
    return [peer]


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


def is_outdated(desired: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """Return whether an object has to be applied again.

    An object with the hash of its content is compared by it. Its replicas and its restarts may then be changed by
    others, for example by an autoscaler.
    """
    expected = desired["metadata"].get("annotations", {}).get(names.CONTENT_HASH_ANNOTATION)
    if expected is None:
        return needs_apply(desired, actual)
    return bool(expected != actual["metadata"].get("annotations", {}).get(names.CONTENT_HASH_ANNOTATION))


def needs_apply(desired: Any, actual: Any) -> bool:
    """Return whether *actual* differs from *desired* in a field of *desired*.

    Fields that only *actual* has were set by others or by the API server and are ignored. The API server omits empty
    fields, so an empty desired value equals a missing one.
    """
    if actual is None and desired in ([], {}, "", None):
        return False
    if isinstance(desired, Mapping):
        if not isinstance(actual, Mapping):
            return True
        return any(needs_apply(value, actual.get(name)) for name, value in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        if not isinstance(actual, Sequence) or len(desired) != len(actual):
            return True
        return any(needs_apply(one, other) for one, other in zip(desired, actual, strict=True))
    return bool(desired != actual)


def check_pods_can_run(context: JobContext) -> None:
    """Reject manifests that are valid for ``rollout run`` but cannot run in pods.

    Raises:
        ManifestError: with one error per field.
    """
    spec, errors = context.job.spec, []
    for path, url in (("spec.redis.url", spec.redis.url), ("spec.history.redis.url", spec.history.redis.url)):
        if url is not None and url.startswith("unix:"):
            errors.append(FieldError(path, "pods cannot reach a Unix socket on another machine; use a redis:// URL"))
    builders: dict[str, Callable[[], object]] = {
        "head": lambda: head_pod(context),
        "workers": lambda: worker_pod(context, 0, replacement=False),
        "server": lambda: server_objects(context),
    }
    for section, build in builders.items():
        try:
            build()
        except PatchError as error:
            errors.append(FieldError(f"spec.{section}.podTemplate", str(error)))
    if errors:
        raise ManifestError(errors)
