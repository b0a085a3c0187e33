"""Kubernetes objects in the form that bundles have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ARCHIVE_KEY = "bundle.tar.gz"
"""Key of the archive in the ConfigMap that the operator keeps of a failed job."""

_DROPPED_METADATA = ("managedFields", "selfLink")
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_EVENT_FIELDS = ("type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime")


def log_path(pod: str, container: str, *, previous: bool) -> str:
    """Return the path of a container's log in a bundle.

    Args:
        pod: name of the pod.
        container: name of the container.
        previous: whether it is the log of the container that ran before it was restarted.
    """
    return f"logs/{pod}/{container}{'-previous' if previous else ''}.log"


def without_noise(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the metadata that only concerns its management."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in _DROPPED_METADATA}
    if _APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != _APPLIED}
    return {**manifest, "metadata": metadata}


def shown_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what matters of Events, in the order of their times."""
    entries = [
        {"object": f"{event['involvedObject'].get('kind')}/{event['involvedObject'].get('name')}"}
        | {name: event[name] for name in _EVENT_FIELDS if event.get(name) is not None}
        for event in events
    ]
    return sorted(entries, key=lambda entry: str(entry.get("lastTimestamp") or entry.get("eventTime") or ""))


def containers_with_logs(pod: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the names of a pod's containers that have a log, and whether it is that of an earlier container."""
    status = pod.get("status", {})
    found = []
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            if container.get("restartCount"):
                found.append((container["name"], True))
            if "waiting" not in container.get("state", {}):
                found.append((container["name"], False))
    return found
