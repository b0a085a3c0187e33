"""Judges whether a namespace admits the pods of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.pod_spec import DEFAULT_GPU_RESOURCE, Resources
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_tools.doctor.findings import GIB, Finding, error, ok, warning

_ENFORCE = "pod-security.kubernetes.io/enforce"
_HEAD_REQUESTS = {"cpu": Decimal("0.5"), "memory": Decimal(GIB)}
"""What the head requests if the manifest says nothing; it has no limits then."""
_SERVER_REQUESTS = {"cpu": Decimal("0.5"), "memory": Decimal(2 * GIB)}
"""The same for a pod of the HTTP server."""


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
        pods.append(PodNeeds("server", server.replicas, of_server or _SERVER_REQUESTS, of_server))
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


def judge_namespace(name: str, namespace: Mapping[str, Any] | None, *, uses_templates: bool) -> list[Finding]:
    """Judge a namespace and its Pod Security level.

    Args:
        name: its name.
        namespace: the object; None if it does not exist.
        uses_templates: whether the manifest changes pods by a podTemplate.
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


def judge_priority_class(name: str, priority_class: Mapping[str, Any] | None) -> Finding:
    """Judge the PriorityClass that a manifest names; None if it does not exist."""
    if priority_class is None:
        return error("PriorityClass", f"{name} does not exist", "create it, or correct spec.priorityClassName")
    return ok("PriorityClass", f"{name}, priority {priority_class.get('value', 0)}")


def judge_worker_memory(pods: PodNeeds) -> Finding:
    """Judge whether worker pods request memory. Those that do not are the first that a node evicts."""
    check = "worker memory"
    if "memory" not in pods.requests:
        return warning(
            check,
            "the workers request no memory",
            "a node that runs out of memory evicts such pods first, and may get more of them than it has room for; set "
            "workers.resources.memory (docs/sizing.md)",
        )
    return ok(check, f"each worker requests {_amount_text('memory', pods.requests['memory'])}")


def judge_quotas(
    quotas: Sequence[Mapping[str, Any]], limit_ranges: Sequence[Mapping[str, Any]], pods: Sequence[PodNeeds]
) -> list[Finding]:
    """Judge the ResourceQuotas and LimitRanges of a namespace.

    Args:
        quotas: the ResourceQuotas.
        limit_ranges: the LimitRanges.
        pods: the pods of a job; none if there is no manifest.
    """
    findings = [one for quota in quotas for one in _judge_quota(quota, _default_limits(limit_ranges), pods)]
    findings += [one for limits in limit_ranges for one in _judge_limits(limits, pods)]
    if not findings:
        names = [one["metadata"]["name"] for one in (*quotas, *limit_ranges)]
        findings.append(ok("quotas", f"{', '.join(names)} admit the job's pods" if names else "no quota or LimitRange"))
    return findings


def _default_limits(limit_ranges: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the resources for which containers get a limit that have none."""
    return {
        name
        for limits in limit_ranges
        for limit in limits["spec"]["limits"]
        if limit["type"] == "Container"
        for name in limit.get("default") or {}
    }


def _judge_quota(quota: Mapping[str, Any], defaults: set[str], pods: Sequence[PodNeeds]) -> Iterator[Finding]:
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
    """Return whether a quota counts requests or limits, and of which resource."""
    for kind in ("requests", "limits"):
        if resource.startswith(f"{kind}."):
            return kind, resource.removeprefix(f"{kind}.")
    return "requests", resource


def _of(pods: PodNeeds, kind: str) -> Mapping[str, Decimal]:
    return pods.limits if kind == "limits" else pods.requests


def _amount_text(resource: str, amount: Decimal) -> str:
    return f"{amount / 2**30:.1f}Gi" if resource == "memory" else f"{amount.normalize():f}"


def _judge_limits(limit_range: Mapping[str, Any], pods: Sequence[PodNeeds]) -> Iterator[Finding]:
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
