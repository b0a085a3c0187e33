"""RolloutJobs as the API server has them: look-up, and what their status says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rollout_api.kubectl_plugin.kubectl import RESOURCE, Kubectl, NotFoundError, PluginError

_WAITING_CONDITIONS = ("Accepted", "QuotaReserved", "WorkersReady", "EngineReady")
"""Conditions in the order in which they become True; the first one that is not says what a job waits for."""


def get_job(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return a RolloutJob.

    Raises:
        PluginError: if it does not exist, with the names of those that do, or if kubectl fails.
    """
    try:
        return kubectl.get(RESOURCE, name)
    except NotFoundError:
        known = [job["metadata"]["name"] for job in kubectl.get(RESOURCE)["items"]]
        where = f"namespace {kubectl.namespace}" if kubectl.namespace else "the current namespace"
        raise PluginError(missing_job(name, where, known)) from None


def missing_job(name: str, where: str, known: Iterable[str]) -> str:
    """Return the message about a job that does not exist in *where*, which has the jobs *known*."""
    names = sorted(known)
    if similar := difflib.get_close_matches(name, names, n=1):
        hint = f"did you mean {similar[0]}?"
    elif names:
        hint = f"the jobs there are {', '.join(names)}"
    else:
        hint = "there are no jobs; choose another namespace with -n"
    return f"there is no RolloutJob {name} in {where}; {hint}"


def condition(job: Mapping[str, Any], kind: str) -> Mapping[str, str]:
    """Return a condition of a job; empty if it has none of this type."""
    conditions: Iterable[Mapping[str, str]] = job.get("status", {}).get("conditions", ())
    return next((found for found in conditions if found["type"] == kind), {})


def explanation(job: Mapping[str, Any]) -> str:
    """Return in one line why a job is not ready or has failed; '' if there is nothing to say."""
    if condition(job, "Ready").get("status") == "True":
        return ""
    failed = condition(job, "Failed")
    if failed.get("status") == "True":
        return _line(failed)
    for kind in _WAITING_CONDITIONS:
        found = condition(job, kind)
        if found and found["status"] != "True":
            return _line(found)
    return _line(condition(job, "Ready"))


def summary(job: Mapping[str, Any]) -> str:
    """Return the state of a job, and why it is not ready, in one line."""
    why = explanation(job)
    return f"{full_name(job)} is {state(job)}{f': {why}' if why else ''}"


def state(job: Mapping[str, Any]) -> str:
    """Return the state of a job in one word."""
    found: str = job.get("status", {}).get("state", "Pending")
    return found


def full_name(job: Mapping[str, Any]) -> str:
    """Return ``namespace/name`` of a job."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def _line(found: Mapping[str, str]) -> str:
    reason, message = found.get("reason", ""), found.get("message", "")
    return f"{reason}: {message}" if reason and message else reason or message
