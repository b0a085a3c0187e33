"""Checks whether a cluster can run the pods of a job: its namespaces, network policies, DNS, nodes and volumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rollout_api.manifest.accelerators import accelerator_labels
from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.pod_spec import DEFAULT_GPU_RESOURCE, Resources, Workers
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_tools.doctor.findings import GIB, Finding, error, ok, warning

_ENFORCE = "pod-security.kubernetes.io/enforce"
_HEAD_REQUESTS = {"cpu": Decimal("0.5"), "memory": Decimal(GIB)}
"""The head's default requests; without others in the manifest, it has no limits."""
_SERVER_REQUESTS = {"cpu": Decimal("0.5"), "memory": Decimal(2 * GIB)}
"""Default requests of a pod of the HTTP server."""
_SERVER_LIMITS = {"memory": Decimal(8 * GIB)}
"""Its default limits."""


@dataclass(frozen=True)
class PodNeeds:
    """Equal pods of a job, and what the container of each requests and is limited to."""

    component: str
    count: int
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    limits: Mapping[str, Decimal] = field(default_factory=dict)


def pod_needs(job: RolloutJob) -> list[PodNeeds]:
    """Return the pods of a job with its largest number of workers, without what podTemplate changes.

    They are those that the operator creates; a test compares them.
    """
    workers, server = job.spec.workers, job.spec.server
    of_worker = _amounts(workers.resources)
    of_worker |= {name: Decimal(number) for name, number in workers.resources.extended.items()}
    if (gpus := workers.gpus_per_worker // workers.pods_per_worker) and workers.device_claim_template is None:
        of_worker[workers.gpu_resource or DEFAULT_GPU_RESOURCE] = Decimal(gpus)
    of_head = _amounts(job.spec.head.resources)
    pods = [
        PodNeeds("head", 1, of_head or _default_head_requests(job), of_head),
        PodNeeds("worker", workers.effective_max * workers.pods_per_worker, of_worker, of_worker),
    ]
    if server is not None:
        of_server = _amounts(server.resources)
        pods.append(PodNeeds("server", server.replicas, of_server or _SERVER_REQUESTS, of_server or _SERVER_LIMITS))
    return pods


def _default_head_requests(job: RolloutJob) -> dict[str, Decimal]:
    dataset = job.spec.source.dataset
    if dataset is None or dataset.environment is None:
        return dict(_HEAD_REQUESTS)
    environment = parse_quantity(dataset.environment.memory_limit)
    memory = _HEAD_REQUESTS["memory"] + _SERVER_REQUESTS["memory"] + environment
    return {**_HEAD_REQUESTS, "memory": memory}


def _amounts(resources: Resources) -> dict[str, Decimal]:
    named = {"cpu": resources.cpu, "memory": resources.memory}
    return {name: parse_quantity(text) for name, text in named.items() if text is not None}


def check_namespace(name: str, namespace: Mapping[str, Any] | None, *, uses_templates: bool) -> list[Finding]:
    """Check a namespace and its Pod Security level.

    *namespace* is None if it does not exist. *uses_templates* says whether the manifest changes pods by a
    podTemplate.
    """
    if namespace is None:
        return [error("namespace", f"{name} does not exist", f"create it: kubectl create namespace {name}")]
    level = (namespace["metadata"].get("labels") or {}).get(_ENFORCE, "privileged")
    if uses_templates and level != "privileged":
        return [
            warning(
                "Pod Security",
                f"{name} enforces {level}",
                "a job's pods satisfy restricted, but what podTemplate adds to them must satisfy the level, too; "
                "try it with kubectl apply --dry-run=server on such a pod",
            )
        ]
    return [ok("Pod Security", f"{name} enforces {level}, and a job's pods satisfy restricted")]


def check_priority_class(name: str, priority_class: Mapping[str, Any] | None) -> Finding:
    """Check the PriorityClass that a manifest names; None if it does not exist."""
    if priority_class is None:
        return error("PriorityClass", f"{name} does not exist", "create it, or correct spec.priorityClassName")
    return ok("PriorityClass", f"{name}, priority {priority_class.get('value', 0)}")


def check_worker_memory(pods: PodNeeds) -> Finding:
    """Check whether worker pods request memory. Those that do not are the first that a node evicts."""
    check = "worker memory"
    if "memory" not in pods.requests:
        return warning(
            check,
            "the workers request no memory",
            "a node that runs out of memory evicts such pods first, and may get more of them than it has room for; set "
            "workers.resources.memory (docs/sizing.md)",
        )
    return ok(check, f"each worker requests {_amount_text('memory', pods.requests['memory'])}")


def check_quotas(
    quotas: Sequence[Mapping[str, Any]], limit_ranges: Sequence[Mapping[str, Any]], pods: Sequence[PodNeeds]
) -> list[Finding]:
    """Check the ResourceQuotas and LimitRanges of a namespace.

    *pods* are those of a job; none if there is no manifest.
    """
    findings = [one for quota in quotas for one in _check_quota(quota, _default_limits(limit_ranges), pods)]
    findings += [one for limits in limit_ranges for one in _check_limits(limits, pods)]
    if not findings:
        names = [one["metadata"]["name"] for one in (*quotas, *limit_ranges)]
        findings.append(ok("quotas", f"{', '.join(names)} admit the job's pods" if names else "no quota or LimitRange"))
    return findings


def _default_limits(limit_ranges: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the resources that get a default limit in containers without one."""
    return {
        name
        for limits in limit_ranges
        for limit in limits["spec"]["limits"]
        if limit["type"] == "Container"
        for name in limit.get("default") or {}
    }


def _check_quota(quota: Mapping[str, Any], defaults: set[str], pods: Sequence[PodNeeds]) -> Iterator[Finding]:
    name = f"ResourceQuota {quota['metadata']['name']}"
    used = quota.get("status", {}).get("used", {})
    for resource, text in quota["spec"].get("hard", {}).items():
        left = parse_quantity(text) - parse_quantity(used.get(resource, "0"))
        kind, counted = _counted(resource)
        if counted in ("pods", "count/pods"):
            needed = Decimal(sum(one.count for one in pods))
        else:
            needed = sum((one.count * _of(one, kind).get(counted, Decimal(0)) for one in pods), Decimal(0))
        if counted in ("cpu", "memory") and counted not in defaults:
            without = [one.component for one in pods if one.count and counted not in _of(one, kind)]
            if without:
                yield error(
                    name,
                    f"{resource} is limited, but the {' and the '.join(without)} sets no {counted} {kind.rstrip('s')}",
                    "the API server rejects such pods; set resources in the manifest, or defaults in a LimitRange",
                )
        if needed > left:
            yield error(
                name,
                f"{_amount_text(counted, left)} of {resource} left, and the job needs {_amount_text(counted, needed)}",
                "pods beyond the quota are rejected; raise it, end other jobs, or reduce workers",
            )


def _counted(resource: str) -> tuple[str, str]:
    """Return whether a quota counts requests or limits, and the resource that it counts."""
    for kind in ("requests", "limits"):
        if resource.startswith(f"{kind}."):
            return kind, resource.removeprefix(f"{kind}.")
    return "requests", resource


def _of(pods: PodNeeds, kind: str) -> Mapping[str, Decimal]:
    return pods.limits if kind == "limits" else pods.requests


def _amount_text(resource: str, amount: Decimal) -> str:
    return f"{amount / 2**30:.1f}Gi" if resource == "memory" else f"{amount.normalize():f}"


def _check_limits(limit_range: Mapping[str, Any], pods: Sequence[PodNeeds]) -> Iterator[Finding]:
    name = f"LimitRange {limit_range['metadata']['name']}"
    for limit in limit_range["spec"]["limits"]:
        if limit["type"] not in ("Container", "Pod"):
            continue
        for resource, text in (limit.get("max") or {}).items():
            for one in pods:
                if (needed := one.limits.get(resource, Decimal(0))) > parse_quantity(text):
                    yield error(
                        name,
                        f"at most {text} of {resource} for each {limit['type'].lower()}, and a {one.component} has "
                        f"{_amount_text(resource, needed)}",
                        "the API server rejects such pods; raise the LimitRange, or reduce resources in the manifest",
                    )


_DNS_PORT = 53
_REDIS_PORT = 6379


def worker_labels(job: str) -> dict[str, str]:
    """Return the labels of a job's worker pods that NetworkPolicies may select."""
    return {
        "app.kubernetes.io/name": "das-rollout",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": "das-rollout",
        "app.kubernetes.io/managed-by": "das-rollout",
        "app.kubernetes.io/component": "worker",
        "das.rollout.dev/job": job,
    }


def check_network_policies(
    policies: Sequence[Mapping[str, Any]], labels: Mapping[str, str], redis_port: int | None
) -> Finding:
    """Check whether NetworkPolicies cut a job's pods off from DNS and Redis.

    Only the ports of rules are examined: which peers a rule means cannot be told from outside. *policies* are those of
    the job's namespace, and *labels* those of the pods. *redis_port* is None if it is unknown.
    """
    limiting = [
        policy
        for policy in policies
        if "Egress" in _types(policy["spec"]) and selects(policy["spec"].get("podSelector") or {}, labels)
    ]
    if not limiting:
        return ok("NetworkPolicies", "none limits the connections of the job's pods")
    names = ", ".join(policy["metadata"]["name"] for policy in limiting)
    rules = [rule for policy in limiting for rule in policy["spec"].get("egress") or ()]
    port = redis_port or _REDIS_PORT
    blocked = [
        what
        for what, number, protocol in ((f"Redis (TCP {port})", port, "TCP"), ("DNS (UDP 53)", _DNS_PORT, "UDP"))
        if not any(_permits(rule, number, protocol) for rule in rules)
    ]
    if blocked:
        return error(
            "NetworkPolicies",
            f"{names} permits no connection to {' and '.join(blocked)}",
            "pods of the job wait for Redis until they fail; add an egress rule for their labels "
            "(app.kubernetes.io/managed-by: das-rollout)",
        )
    return ok("NetworkPolicies", f"{names} limits the job's pods, and permits Redis (TCP {port}) and DNS")


def _types(spec: Mapping[str, Any]) -> Sequence[str]:
    """Return the directions that a policy limits, with the API server's defaults."""
    types: Sequence[str] = spec.get("policyTypes") or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    return types


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects an object with *labels*."""
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or ():
        value, values = labels.get(expression["key"]), expression.get("values") or ()
        matches = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not matches[expression["operator"]]:
            return False
    return True


def _permits(rule: Mapping[str, Any], number: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(_includes(port, number, protocol) for port in ports)


def _includes(port: Mapping[str, Any], number: int, protocol: str) -> bool:
    if port.get("protocol", "TCP") != protocol:
        return False
    first = port.get("port")
    # The number of a named port is known only in the pods that listen on it.
    return first is None or isinstance(first, str) or first <= number <= port.get("endPort", first)


def check_dns(dns_pods: Sequence[Mapping[str, Any]]) -> Finding:
    """Check the pods of the cluster's DNS server, which are labelled ``k8s-app=kube-dns``."""
    ready = sum(
        any(one["type"] == "Ready" and one["status"] == "True" for one in pod.get("status", {}).get("conditions", ()))
        for pod in dns_pods
    )
    if not dns_pods:
        return warning(
            "DNS",
            "no pod with the label k8s-app=kube-dns in kube-system",
            "pods find Redis and their head by name; if the cluster has another DNS server, ignore this",
        )
    if not ready:
        return error(
            "DNS", f"none of {len(dns_pods)} pods is ready", "see kubectl -n kube-system logs -l k8s-app=kube-dns"
        )
    return ok("DNS", f"{ready} of {len(dns_pods)} pods are ready")


def check_name(name: str, failure: str) -> Finding:
    """Check whether this pod can resolve a name of the cluster; *failure* is empty if it can."""
    if failure:
        return error("DNS", f"{name} cannot be resolved: {failure}", "see the pod's dnsPolicy and the DNS server's log")
    return ok("DNS", f"{name} is resolved")


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def check_nodes(nodes: Sequence[Mapping[str, Any]], workers: Workers | None) -> Finding:
    """Check whether the workers fit onto the nodes. How much of them other pods use is not examined.

    *workers* is the section of the manifest; None if there is no manifest.
    """
    usable = [node for node in nodes if _is_usable(node)]
    resource = (workers.gpu_resource if workers is not None else None) or DEFAULT_GPU_RESOURCE
    with_gpus = [node for node in usable if _gpus(node, resource)]
    seen = (
        f"{len(usable)} of {len(nodes)} nodes are ready and schedulable; {sum(_gpus(one, resource) for one in usable)} "
        f"{resource} on {len(with_gpus)} of them"
    )
    if not usable:
        return error("nodes", seen, "pods stay pending; add nodes, or let an autoscaler do so")
    if workers is None or not workers.gpus_per_worker or workers.device_claim_template is not None:
        return ok("nodes", seen)
    if not with_gpus:
        return error(
            "nodes",
            seen,
            "worker pods stay pending; install the device plugin of the GPUs, add nodes with GPUs (an autoscaler may "
            "do so later), or set workers.gpuResource",
        )
    if workers.accelerator is not None:
        with_gpus = [node for node in with_gpus if _has_accelerator(node, workers.accelerator)]
        if not with_gpus:
            return error(
                "nodes",
                f"{seen}; none has a label of {workers.accelerator}",
                f"worker pods stay pending; label the nodes das.rollout.dev/accelerator={workers.accelerator}, or "
                "correct workers.accelerator",
            )
    each = workers.gpus_per_worker // workers.pods_per_worker
    room = sum(_gpus(node, resource) // each for node in with_gpus)
    if room < workers.pods_per_worker:
        return error(
            "nodes",
            seen,
            f"a worker needs {workers.pods_per_worker} × {each} GPUs of one node each; reduce workers.gpusPerWorker, "
            "or divide the worker with workers.podsPerWorker",
        )
    if room < workers.effective_max * workers.pods_per_worker:
        return warning(
            "nodes",
            seen,
            f"there is room for {room // workers.pods_per_worker} of {workers.effective_max} workers; the others wait "
            "for nodes",
        )
    return ok("nodes", f"{seen}; room for all {workers.effective_max} workers if other pods leave it")


def _is_usable(node: Mapping[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and not node.get("spec", {}).get("unschedulable", False)


def _gpus(node: Mapping[str, Any], resource: str) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(resource, 0))


def _has_accelerator(node: Mapping[str, Any], kind: str) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(labels.get(name) in values for name, values in accelerator_labels(kind).items())


def check_claim(name: str, claim: Mapping[str, Any] | None) -> Finding:
    """Check a PersistentVolumeClaim that a manifest names; None if it does not exist."""
    check = f"claim {name}"
    if claim is None:
        return error(
            check, "does not exist", "pods stay pending; create the PersistentVolumeClaim, or correct the manifest"
        )
    phase = claim.get("status", {}).get("phase", "Pending")
    modes = claim["spec"].get("accessModes", [])
    seen = f"{phase}, {', '.join(modes)}"
    if phase == "Lost":
        return error(check, seen, "its volume is gone; create the claim again")
    if phase != "Bound":
        return warning(check, seen, "it is bound when its first pod is scheduled, or never; see kubectl describe pvc")
    if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        return warning(
            check, seen, "all pods of a job mount it, and must run on one node with this mode; use ReadWriteMany"
        )
    return ok(check, seen)


def check_storage_classes(classes: Sequence[Mapping[str, Any]]) -> Finding:
    """Check whether claims without a class, such as that of the chart's Redis, get volumes."""
    default = [one for one in classes if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    if not default:
        return warning(
            "storage class",
            f"{len(classes)} classes, none of which is the default",
            "the claim of the chart's Redis stays pending; set redis.storageClassName, or mark a class as the default",
        )
    return ok("storage class", f"the default is {default[0]['metadata']['name']}")
