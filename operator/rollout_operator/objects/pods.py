"""Builds the manifests of a job's pods; pure functions of the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from rollout_api.manifest.accelerators import accelerator_labels
from rollout_api.manifest.field_types import SecretKey, parse_quantity
from rollout_api.manifest.pod_spec import DEFAULT_GPU_RESOURCE, Resources, Server, Toleration, Workers
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.status_token import HASH_VARIABLE
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.strategic_merge import PatchError, strategic_merge

MANIFEST_FILE = "job.yaml"
HANDOVER_GRACE_S = 20
"""Seconds that a worker has after ``workers.drainSeconds`` to hand over unfinished rollouts and end its processes."""
HEAD_GRACE_S = 30
"""Termination grace period of the head."""
PREFETCH_GRACE_S = 5
"""Termination grace period of the prefetch pod, which has nothing to hand over."""
CLEANUP_DEADLINE_S = 60
"""Seconds that the cleanup pod may run, including its wait for Redis."""

_OWN_FIELDS = frozenset(
    {"args", "command", "lifecycle", "livenessProbe", "ports", "readinessProbe", "resources", "startupProbe"}
)
"""Fields of the head's container that the prefetch pod and the cleanup pod do not take over."""
_HEAD_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
"""The head's default requests. Without a request it would be the first pod to be evicted, and
its start would take many times as long beside busy pods while rollouts may wait for it."""
_SERVER_REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Default requests of a pod of the HTTP server."""
_SERVER_LIMITS = {"memory": "8Gi"}
"""Default limits of a pod of the HTTP server, so that what its clients send cannot take the memory of the node."""
_SERVER_PRE_STOP_S = 5
"""Seconds that a server that is ending still accepts connections."""
_SERVER_GRACE_S = 35
"""Seconds that a server has afterwards to answer the requests in progress."""
_CLEANUP_RESOURCES = {"cpu": "100m", "memory": "512Mi"}
"""Requests and limits of the cleanup pod, so that a quota of the namespace admits it."""
_DO_NOT_DISRUPT = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations that make autoscalers of nodes leave a pod where it is, instead of moving it to save a node."""
_GPU_CLAIM = "gpus"
"""Name, within a worker pod, of the ResourceClaim that gives it its GPUs."""
_SERVES_STATUS = {
    "ports": [{"name": "http", "containerPort": names.HTTP_PORT}],
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "http"},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 3,
    },
}
"""Fields of the containers of a head and a worker."""
_HOSTNAME = "kubernetes.io/hostname"
"""Label of a node with its name."""
_WHEN_SCHEDULED = "DuringSchedulingIgnoredDuringExecution"
"""End of the names of an affinity's fields."""
_UNREACHABLE_TOLERATION_S = 30
_USER = 1000
_MANIFEST_MOUNT = "/etc/rollout"
_MODELS_MOUNT = "/models"
_HUB_HOME = f"{_MODELS_MOUNT}/huggingface"
"""Directory of the Hugging Face libraries in the model cache; its subdirectory ``hub`` has the models."""
_COMPILED = "compiled"
"""Directory, in the model cache, of what engines have compiled."""
_COMPILED_VARIABLE = "VLLM_CACHE_ROOT"
"""Variable that names this directory to vLLM, which also keeps the caches of torch, Triton and DeepGEMM there."""
WEIGHTS_MOUNT = "/weights"
_TOKENS_MOUNT = "/etc/rollout-tokens"
_TLS_MOUNT = "/etc/rollout-tls"


def head_pod(context: JobContext, *, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the head pod, which runs the coordinator and the relay; *taken* are names of other pods."""
    head = context.job.spec.head
    container = {
        "name": names.HEAD,
        "command": ["rollout", "head"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--http-port={names.HTTP_PORT}",
        ],
        **_SERVES_STATUS,
        "resources": _resources(head.resources) or {"requests": _head_requests(context.job)},
    }
    pod = _pod(
        context,
        names.pod_name(context.name, names.HEAD, taken=taken),
        names.HEAD,
        container,
        "1Gi",
        head.tolerations,
        head.node_selector,
    )
    pod["spec"]["terminationGracePeriodSeconds"] = HEAD_GRACE_S
    if context.status_token_hash:
        # The hash is enough to check the token, so that neither the pod nor its namespace needs a Secret.
        pod["spec"]["containers"][0]["env"].append({"name": HASH_VARIABLE, "value": context.status_token_hash})
    return _in_queue(context, _with_template(context, pod, head.pod_template), index=0)


def _head_requests(job: RolloutJob) -> dict[str, str]:
    """Return what the head requests if the manifest says nothing, with the memory of the environment that it runs."""
    dataset = job.spec.source.dataset
    if dataset is None or dataset.environment is None:
        return dict(_HEAD_REQUESTS)
    # An environment of several turns samples from an HTTP server on the head.
    amounts = (_HEAD_REQUESTS["memory"], _SERVER_REQUESTS["memory"], dataset.environment.memory_limit)
    return {**_HEAD_REQUESTS, "memory": f"{sum(map(parse_quantity, amounts)) / 2**20:.0f}Mi"}


def worker_pod(
    context: JobContext, slot: int, *, rank: int = 0, replacement: bool, taken: Collection[str] = ()
) -> dict[str, Any]:
    """Return a pod of the worker in a slot, which runs engines, or a part of one.

    *replacement* says whether another pod had this slot and rank before, and *taken* are the names of other pods.
    """
    spec = context.job.spec
    workers = spec.workers
    container: dict[str, Any] = {
        "name": names.WORKER,
        "command": ["rollout", "follower" if rank else "worker"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--http-port={names.HTTP_PORT}",
            *([f"--group={names.worker(context.name, slot)}"] if context.pods_per_worker > 1 else []),
            *([f"--rank={rank}"] if rank else []),
        ],
        **_SERVES_STATUS,
        "resources": _worker_resources(context.job),
    }
    tolerations = [*workers.tolerations, *_gpu_tolerations(workers)]
    name = names.pod_name(context.name, names.WORKER, slot, rank=rank, taken=taken)
    pod = _pod(context, name, names.WORKER, container, workers.shared_memory, tolerations, workers.node_selector)
    pod["metadata"]["labels"] |= {names.SLOT_LABEL: str(slot), names.RANK_LABEL: str(rank)}
    cache = spec.model.cache
    if workers.gpus_per_worker and cache.persistent_volume_claim is not None:
        # Otherwise every replacement would compile again.
        compiled = f"{_MODELS_MOUNT}/{_COMPILED}"
        if cache.prefetch:
            compiled = f"/{_COMPILED}"  # the rest of the claim is mounted read-only
            container["volumeMounts"].append({"name": "models", "mountPath": compiled, "subPath": _COMPILED})
        container["env"].append({"name": _COMPILED_VARIABLE, "value": compiled})
    if replacement:
        pod["metadata"]["annotations"][names.REPLACEMENT_ANNOTATION] = "true"
    match context.gang_api:
        case names.COSCHEDULING_API:
            pod["metadata"]["labels"][names.COSCHEDULING_LABEL] = context.gang(slot)
        case names.VOLCANO_API:
            pod["metadata"]["annotations"][names.VOLCANO_ANNOTATION] = context.gang(slot)
        case names.NATIVE_GANG_API:
            pod["spec"]["schedulingGroup"] = {"podGroupName": context.gang(slot)}
    if context.queue is not None:
        pod["metadata"]["annotations"] |= _kueue_annotations(context, slot)
    pod["spec"]["terminationGracePeriodSeconds"] = workers.drain_seconds + HANDOVER_GRACE_S
    if workers.runtime_class_name is not None:
        pod["spec"]["runtimeClassName"] = workers.runtime_class_name
    if affinity := _worker_affinity(context, slot):
        pod["spec"]["affinity"] = affinity
    if not workers.gpus_per_worker:
        pod["spec"]["topologySpreadConstraints"] = _spread_over_nodes(context, names.WORKER)
    if _claims_gpus(workers):
        claim = {"name": _GPU_CLAIM, "resourceClaimTemplateName": workers.device_claim_template}
        pod["spec"]["resourceClaims"] = [claim]
    index = slot * context.pods_per_worker + rank if context.is_in_pod_group(slot) else None
    return _in_queue(context, _with_template(context, pod, workers.pod_template), index=index)


def server_pod(context: JobContext, server: Server) -> dict[str, Any]:
    """Return a pod of the HTTP server as the template of a Deployment; its name has no meaning."""
    mounts: dict[str, tuple[str, str]] = {}
    args = [
        f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
        f"--uid={context.uid}",
        "--host=",  # all addresses, of IPv4 and IPv6
        f"--port={names.SERVER_PORT}",
    ]
    if server.tokens_secret_name is not None:
        mounts["tokens"] = (_TOKENS_MOUNT, server.tokens_secret_name)
        args.append(f"--tokens={_TOKENS_MOUNT}")
    if server.max_requests_per_token:
        args.append(f"--max-requests-per-token={server.max_requests_per_token}")
    if server.max_model_tokens_per_token:
        args.append(f"--max-model-tokens-per-token={server.max_model_tokens_per_token}")
    if server.tls_secret_name is not None:
        mounts["tls"] = (_TLS_MOUNT, server.tls_secret_name)
        args += [f"--certificate={_TLS_MOUNT}/tls.crt", f"--certificate-key={_TLS_MOUNT}/tls.key"]
    probe = {"path": "/ping", "port": "http", "scheme": "HTTP" if server.tls_secret_name is None else "HTTPS"}
    container = {
        "name": names.SERVER,
        "command": ["rollout", "serve"],
        "args": [*args, *server.args],
        "ports": [{"name": "http", "containerPort": names.SERVER_PORT}],
        # The server listens only when it has the model's tokenizer and has found the job.
        "startupProbe": {"httpGet": probe, "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 900},
        "readinessProbe": {"httpGet": {**probe, "path": "/health"}, "periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": {"httpGet": probe, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        # Connections arrive until every node knows that the pod is ending.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_SERVER_PRE_STOP_S)]}}},
        "resources": _resources(server.resources)
        or {"requests": dict(_SERVER_REQUESTS), "limits": dict(_SERVER_LIMITS)},
    }
    pod = _pod(
        context,
        names.server(context.name),
        names.SERVER,
        container,
        "64Mi",
        server.tolerations,
        server.node_selector,
    )
    # A pod that is moved to another node is replaced before it ends, and requests can be repeated.
    pod["metadata"]["annotations"] = {}
    pod["metadata"]["labels"].pop(names.REVISION_LABEL, None)
    pod["spec"] |= {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": _SERVER_PRE_STOP_S + _SERVER_GRACE_S,
        "topologySpreadConstraints": _spread_over_nodes(context, names.SERVER),
    }
    main = pod["spec"]["containers"][0]
    for name, (path, secret) in mounts.items():
        main["volumeMounts"].append({"name": name, "mountPath": path, "readOnly": True})
        pod["spec"]["volumes"].append({"name": name, "secret": {"secretName": secret}})
    return _with_template(context, pod, server.pod_template)


def prefetch_pod(context: JobContext, *, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the pod that downloads the model into the claim of the model cache; *taken* are names of other pods.

    It runs where the head may run, with what ``head.podTemplate`` adds to the head's container and pod, such as a
    proxy or the certificates of an authority. It is in no queue, because it has no GPUs, and because Kueue would count
    it as one of the group.
    """
    head = context.job.spec.head
    container: dict[str, Any] = {
        "name": names.PREFETCH,
        "command": ["rollout", "prefetch"],
        "args": [f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}"],
        "resources": _resources(head.resources) or {"requests": dict(_HEAD_REQUESTS)},
    }
    name = names.pod_name(context.name, names.PREFETCH, taken=taken)
    pod = _pod(
        context, name, names.PREFETCH, container, "64Mi", head.tolerations, head.node_selector, writes_models=True
    )
    # The pod creates this directory. The kubelet would, but not for the user of the pods.
    container["env"].append({"name": _COMPILED_VARIABLE, "value": f"{_MODELS_MOUNT}/{_COMPILED}"})
    pod = _with_template(context, pod, _template_like_head(head.pod_template, names.PREFETCH))
    pod["spec"] |= {
        "terminationGracePeriodSeconds": PREFETCH_GRACE_S,
        # A running pod is ready, so that the job's timeout for pods that are not ready does not end it.
        "activeDeadlineSeconds": context.job.spec.lifecycle.ready_timeout_seconds,
    }
    return pod


def cleanup_pod(context: JobContext, *, delete_messages: bool, reason: str) -> dict[str, Any]:
    """Return the pod that marks the job as ended in Redis and moves finished rollouts to the history.

    It runs where the head may run, with what ``head.podTemplate`` adds to the head's container and pod, such as the
    certificates of an authority. Its commands and further containers of the template are left out. *reason* is the
    message for the job's clients.
    """
    container = {
        "name": names.CLEANUP,
        "command": ["rollout", "end"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--reason={reason}",
            *(["--delete"] if delete_messages else []),
        ],
        "resources": {"requests": dict(_CLEANUP_RESOURCES), "limits": dict(_CLEANUP_RESOURCES)},
    }
    head = context.job.spec.head
    name = names.cleanup_pod(context.name)
    pod = _pod(context, name, names.CLEANUP, container, "64Mi", head.tolerations, head.node_selector)
    # The template of a job that never ran may be invalid, and the job must nevertheless be deletable.
    with suppress(PatchError):
        pod = _with_template(context, pod, _template_like_head(head.pod_template, names.CLEANUP))
    pod["spec"] |= {"terminationGracePeriodSeconds": 5, "activeDeadlineSeconds": CLEANUP_DEADLINE_S}
    return pod


def _template_like_head(head_template: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Return the part of the head's template that also fits the pod of another component.

    Raises:
        PatchError: if the template cannot be merged into a pod.
    """
    strategic_merge({"spec": {"containers": []}}, head_template)
    spec = dict(head_template.get("spec") or {})
    spec.pop("initContainers", None)
    containers = [
        {**{name: value for name, value in container.items() if name not in _OWN_FIELDS}, "name": component}
        for container in spec.get("containers") or ()
        if container.get("name") == names.HEAD
    ]
    return {**head_template, "spec": {**spec, "containers": containers}} if head_template else {}


def _worker_affinity(context: JobContext, slot: int) -> dict[str, Any]:
    """Return which nodes and which neighbors the pods of the worker in a slot need or prefer."""
    workers = context.job.spec.workers
    affinity: dict[str, Any] = {}
    if workers.accelerator is not None and workers.gpus_per_worker:
        # Nodes on which any of these labels names the kind of GPU are accepted.
        terms = [
            {"matchExpressions": [{"key": key, "operator": "In", "values": values}]}
            for key, values in accelerator_labels(workers.accelerator).items()
        ]
        affinity["nodeAffinity"] = {f"required{_WHEN_SCHEDULED}": {"nodeSelectorTerms": terms}}
    selector = names.selector(context.name, names.WORKER)
    # In a queue, Kueue decides; and pods with different affinities would be different roles, of which it admits eight.
    topology_key = workers.topology_key if context.queue is None else None
    if context.pods_per_worker == 1:
        near = [] if topology_key is None else [_near(topology_key, selector)]
        if workers.gpus_per_worker:
            # Workers of any job in the namespace fill nodes that they occupy already, so that whole nodes stay free.
            near.append(_near(_HOSTNAME, {names.MANAGED_BY: names.APP, names.COMPONENT_LABEL: names.WORKER}))
        if near:
            affinity["podAffinity"] = {f"preferred{_WHEN_SCHEDULED}": _weighted(near)}
    elif topology_key is not None:
        # Pods are placed one by one, so the workers are kept apart, or their leaders would take the followers' places.
        same_worker = {**selector, names.SLOT_LABEL: str(slot)}
        affinity["podAffinity"] = {f"required{_WHEN_SCHEDULED}": [_near(topology_key, same_worker)]}
        affinity["podAntiAffinity"] = {f"preferred{_WHEN_SCHEDULED}": _weighted([_near(topology_key, selector)])}
    return affinity


def _weighted(terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return terms of an affinity as preferences with equal weights."""
    return [{"weight": 100, "podAffinityTerm": term} for term in terms]


def _near(topology_key: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a term of an affinity to pods with these labels in the same domain of a topology."""
    return {"topologyKey": topology_key, "labelSelector": {"matchLabels": dict(labels)}}


def _kueue_annotations(context: JobContext, slot: int) -> dict[str, str]:
    """Return the annotations that tell Kueue how to admit and place the pods of the worker in a slot.

    They are those of the RolloutJob, and the topology of the manifest unless the RolloutJob has a request for one.
    """
    annotations = _of_kueue(context.annotations)
    key = context.job.spec.workers.topology_key
    if key is None or any(name.startswith(names.PODSET_ANNOTATIONS) for name in annotations):
        return annotations
    annotations[f"{names.PODSET_ANNOTATIONS}preferred-topology"] = key
    if context.pods_per_worker > 1 and context.is_in_pod_group(slot):
        # A slice consists of pods with successive indices: the pods of one worker.
        annotations[f"{names.PODSET_ANNOTATIONS}slice-required-topology"] = key
        annotations[f"{names.PODSET_ANNOTATIONS}slice-size"] = str(context.pods_per_worker)
    return annotations


def _of_kueue(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return those of an object's labels or annotations that are Kueue's."""
    return {name: value for name, value in metadata.items() if name.startswith(f"{names.KUEUE_GROUP}/")}


def _spread_over_nodes(context: JobContext, component: str) -> list[dict[str, Any]]:
    return [
        {
            "maxSkew": 1,
            "topologyKey": _HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": names.selector(context.name, component)},
        }
    ]


def _resources(resources: Resources, extended: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the resources of a container; the requests of extended ones default to their limits."""
    amounts = {name: amount for name, amount in (("cpu", resources.cpu), ("memory", resources.memory)) if amount}
    limits = amounts | {name: str(number) for name, number in (extended or {}).items()}
    return {"requests": amounts, "limits": limits} if limits else {}


def _worker_resources(job: RolloutJob) -> dict[str, Any]:
    """Return the resources of the container of each pod of a worker."""
    workers, cache = job.spec.workers, job.spec.model.cache
    extended = dict(workers.resources.extended)
    gpus = workers.gpus_per_worker // workers.pods_per_worker
    if gpus and not _claims_gpus(workers):
        extended[workers.gpu_resource or DEFAULT_GPU_RESOURCE] = gpus
    resources = _resources(workers.resources, extended)
    if _claims_gpus(workers):
        resources["claims"] = [{"name": _GPU_CLAIM}]
    if cache.size_limit is not None and cache.persistent_volume_claim is None:
        resources["requests"] = {**resources.get("requests", {}), "ephemeral-storage": cache.size_limit}
    return resources


def _claims_gpus(workers: Workers) -> bool:
    """Return whether the GPUs of a worker come from a ResourceClaim."""
    return workers.device_claim_template is not None and workers.gpus_per_worker > 0


def _gpu_tolerations(workers: Workers) -> list[Toleration]:
    """Return tolerations of the taints that keep other pods off GPU nodes.

    Nodes are tainted with the resource's name, or with that of the vendor's whole GPUs even if they offer partitions.
    """
    if not workers.gpus_per_worker:
        return []
    resource = workers.gpu_resource or DEFAULT_GPU_RESOURCE
    keys = dict.fromkeys((resource, f"{resource.partition('/')[0]}/gpu"))
    return [Toleration(key=key, operator="Exists", effect="NoSchedule") for key in keys]


def _pod(
    context: JobContext,
    name: str,
    component: str,
    container: dict[str, Any],
    shared_memory: str,
    tolerations: list[Toleration],
    node_selector: dict[str, str],
    *,
    writes_models: bool = False,
) -> dict[str, Any]:
    spec = context.job.spec
    reads_models = spec.model.cache.prefetch and not writes_models
    container |= {
        "image": spec.image.name or context.default_image,
        # Copies the end of the log into the pod's status, which can be read without the permission to read logs.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": _environment(context, models_are_read_only=reads_models),
    }
    if spec.image.pull_policy is not None:
        container["imagePullPolicy"] = spec.image.pull_policy
    container["volumeMounts"], volumes = _volumes(context, shared_memory, models_are_read_only=reads_models)
    pod_spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": names.service_account(context.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **(
                {} if context.cluster_assigns_user_ids else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER)
            ),
            # Else the kubelet would change the owner of every file of a volume whenever a pod starts.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            *(toleration.model_dump(by_alias=True, exclude_none=True) for toleration in tolerations),
            # The pods of a lost node are replaced sooner than after Kubernetes' default of five minutes.
            *(
                {
                    "key": f"node.kubernetes.io/{taint}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _UNREACHABLE_TOLERATION_S,
                }
                for taint in ("not-ready", "unreachable")
            ),
        ],
        "containers": [container],
        "volumes": volumes,
    }
    labels = names.labels(context.name, component)
    if context.revision is not None:
        labels[names.REVISION_LABEL] = context.revision.hash
    if node_selector:
        pod_spec["nodeSelector"] = dict(node_selector)
    if spec.image.pull_secrets:
        pod_spec["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image.pull_secrets]
    if spec.priority_class_name is not None:
        pod_spec["priorityClassName"] = spec.priority_class_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": context.job.metadata.namespace,
            "labels": labels,
            "annotations": dict(_DO_NOT_DISRUPT),
            "ownerReferences": [context.owner_reference],
        },
        "spec": pod_spec,
    }


def _environment(context: JobContext, *, models_are_read_only: bool) -> list[dict[str, Any]]:
    spec = context.job.spec
    values = {"HOME": "/tmp", "USER": "rollout", "ROLLOUT_MODEL_CACHE": _MODELS_MOUNT, "HF_HOME": _HUB_HOME}
    if models_are_read_only:
        # The libraries write other files than models, too. Without access to the hub they never want to update a model,
        # so that all pods load the same commit, even if the branch has moved on.
        values |= {"HF_HOME": "/tmp/huggingface", "HF_HUB_CACHE": f"{_HUB_HOME}/hub", "HF_HUB_OFFLINE": "1"}
    secrets: dict[str, SecretKey] = {}
    if context.redis_secret is not None:
        secrets["ROLLOUT_REDIS_URL"] = context.redis_secret
    elif spec.redis.url is not None:
        values["ROLLOUT_REDIS_URL"] = spec.redis.url
    if spec.history.redis.url_from is not None:
        secrets["ROLLOUT_HISTORY_REDIS_URL"] = spec.history.redis.url_from.secret_key_ref
    elif spec.history.redis.url is not None:
        values["ROLLOUT_HISTORY_REDIS_URL"] = spec.history.redis.url
    if spec.model.token_secret_ref is not None:
        secrets["HF_TOKEN"] = spec.model.token_secret_ref
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
            for name, secret in secrets.items()
        ),
    ]


def _volumes(
    context: JobContext, shared_memory: str, *, models_are_read_only: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume mounts of the container and the volumes of the pod."""
    spec = context.job.spec
    cache = spec.model.cache
    private_cache = {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "manifest": (_MANIFEST_MOUNT, {"configMap": {"name": names.manifest_config_map(context.name)}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
        "models": (_MODELS_MOUNT, _claim(cache.persistent_volume_claim) or {"emptyDir": private_cache}),
    }
    if (weights := _claim(spec.weights.persistent_volume_claim)) is not None:
        sources["weights"] = (WEIGHTS_MOUNT, weights)
    read_only = {"manifest", "models"} if models_are_read_only else {"manifest"}
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name in read_only else {})}
        for name, (path, _) in sources.items()
    ]
    return mounts, [{"name": name, **source} for name, (_, source) in sources.items()]


def _claim(name: str | None) -> dict[str, Any] | None:
    return None if name is None else {"persistentVolumeClaim": {"claimName": name}}


def avoid_nodes(pod: dict[str, Any], nodes: Collection[str]) -> dict[str, Any]:
    """Keep a pod off some nodes, in addition to its other constraints, and return it."""
    if not nodes:
        return pod
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        names.AVOIDED_NODES_ANNOTATION: ",".join(sorted(nodes)),
    }
    affinity = dict(spec.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (node_affinity.get(required) or {}).get("nodeSelectorTerms") or [{}]
    avoids = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(nodes)}
    # A node has to match one of the terms, so that each of them needs the expression.
    terms = [{**term, "matchExpressions": [*(term.get("matchExpressions") or ()), avoids]} for term in terms]
    spec["affinity"] = {**affinity, "nodeAffinity": {**node_affinity, required: {"nodeSelectorTerms": terms}}}
    return pod


def _with_template(context: JobContext, pod: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's template into the pod, but keep the metadata that the operator finds the pod by.

    Raises:
        PatchError: if the template cannot be merged, or is not one of a pod. With another kind, the operator would
            create any object with its own permissions.
    """
    if others := sorted(template.keys() - {"metadata", "spec"}):
        raise PatchError(f"{', '.join(others)}: a pod template has only metadata and spec; remove the rest")
    result = strategic_merge(pod, template)
    if "spec" not in result:
        raise PatchError("the template must not remove the pod's spec")
    required, metadata = pod["metadata"], result.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), **required["labels"]}
    own = {name: value for name, value in required["annotations"].items() if name == names.REPLACEMENT_ANNOTATION}
    annotations = {**(metadata.get("annotations") or {}), **own}
    annotations.pop(names.AVOIDED_NODES_ANNOTATION, None)
    result["metadata"] = {**metadata, **required, "labels": labels, "annotations": annotations}
    return result


def _in_queue(context: JobContext, pod: dict[str, Any], *, index: int | None) -> dict[str, Any]:
    """Add Kueue's labels: it admits the head and the minimum of workers as one group, and other workers singly.

    *index* is the number of the pod among those of its role in the group; None for a pod that is not in the group.
    """
    if context.queue is None:
        return pod
    metadata = pod["metadata"]
    metadata["labels"] |= {**_of_kueue(context.labels), names.QUEUE_LABEL: context.queue}
    if index is not None and context.pod_group is not None:
        metadata["labels"] |= {
            names.POD_GROUP_LABEL: context.pod_group.name,
            names.POD_GROUP_INDEX_LABEL: str(index),
        }
        total = str(context.pod_group.total_count)
        metadata["annotations"] = {**metadata.get("annotations", {}), names.POD_GROUP_TOTAL_ANNOTATION: total}
    return pod
