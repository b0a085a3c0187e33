"""Judges whether pods of a job can resolve names and reach Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_tools.doctor.findings import Finding, error, ok, warning

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


def judge_network_policies(
    policies: Sequence[Mapping[str, Any]], labels: Mapping[str, str], redis_port: int | None
) -> Finding:
    """Judge whether NetworkPolicies cut a job's pods off from DNS and Redis.

    Only the ports of rules are examined: which peers a rule means cannot be told from outside.

    Args:
        policies: the NetworkPolicies of the job's namespace.
        labels: labels of the pods.
        redis_port: port of the job's Redis; None if it is unknown.
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


def judge_dns(dns_pods: Sequence[Mapping[str, Any]]) -> Finding:
    """Judge the pods of the cluster's DNS server, which are labelled ``k8s-app=kube-dns``."""
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


def judge_name(name: str, failure: str) -> Finding:
    """Judge whether this pod can resolve a name of the cluster; *failure* is empty if it can."""
    if failure:
        return error("DNS", f"{name} cannot be resolved: {failure}", "see the pod's dnsPolicy and the DNS server's log")
    return ok("DNS", f"{name} is resolved")
