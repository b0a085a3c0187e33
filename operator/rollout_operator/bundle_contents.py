"""The content of the ConfigMap with what is kept of a failed job. Pure."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_api.bundle.archive import BundleArchive
from rollout_api.bundle.kubernetes_objects import ARCHIVE_KEY, log_path, shown_events, without_noise
from rollout_api.bundle.redaction import Redactor
from rollout_operator import names
from rollout_operator.conditions import format_timestamp
from rollout_operator.observed import Manifest

MAX_BYTES = 700 << 10
"""Size of the archive. A ConfigMap may have 1 MiB, and a request to the API server is larger by a third."""
_MAX_LOG_BYTES = 512 << 10
"""Size to which each log is cut at first; it is halved until the archive is small enough."""
_MIN_LOG_BYTES = 512


class ContainerLog(NamedTuple):
    """The end of a container's log."""

    pod: str
    container: str
    previous: bool
    """Whether it is that of the container that ran before it was restarted."""
    text: str

    @property
    def path(self) -> str:
        """Path of the log in the archive."""
        return log_path(self.pod, self.container, previous=self.previous)


@dataclass
class Evidence:
    """What was read of a failed job."""

    job: Manifest
    pods: list[Manifest] = field(default_factory=list)
    events: list[Manifest] = field(default_factory=list)
    logs: list[ContainerLog] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Path in the archive → why it could not be read."""


def bundle_config_map(evidence: Evidence, name: str, now: float) -> dict[str, Any]:
    """Return the ConfigMap with what is kept of a failed job. It has no owner, so that it outlives the job.

    Args:
        evidence: what was read.
        name: name of the ConfigMap.
        now: current Unix time.
    """
    metadata = evidence.job["metadata"]
    job = metadata["name"]
    labels = names.labels_outside_release("bundle") | {names.BUNDLE_LABEL: job}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": {names.JOB_UID_ANNOTATION: metadata["uid"]},
        },
        "data": {"README": _summary(evidence.job, name, now)},
        "binaryData": {ARCHIVE_KEY: base64.b64encode(pack(evidence, now)).decode()},
    }


def pack(evidence: Evidence, now: float, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the archive of a bundle, with as much of the ends of the logs as fits into *max_bytes*."""
    redactor = Redactor()
    logs = {log.path: redactor.text(log.text) for log in evidence.logs}
    limit = _MAX_LOG_BYTES
    while True:
        archive = _archive(evidence, {path: last_lines(text, limit) for path, text in logs.items()}, redactor, now)
        if len(archive) <= max_bytes or limit <= _MIN_LOG_BYTES:
            return archive
        limit //= 2


def last_lines(text: str, max_bytes: int) -> str:
    """Return the last lines of *text* that have at most *max_bytes* bytes, or the end of its last line."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    end = data[len(data) - max_bytes :]
    is_line = data[len(data) - max_bytes - 1 : len(data) - max_bytes] == b"\n"
    rest = end if is_line else end.partition(b"\n")[2]
    return (rest or end).decode(errors="ignore")


def _archive(evidence: Evidence, logs: Mapping[str, str], redactor: Redactor, now: float) -> bytes:
    metadata = evidence.job["metadata"]
    file = io.BytesIO()
    archive = BundleArchive(file, folder=f"bundle-{metadata['namespace']}-{metadata['name']}", redactor=redactor)
    archive.add("job.json", "The RolloutJob: its spec and its status.", without_noise(evidence.job))
    archive.add("events.json", "The Events on the job and its pods.", shown_events(evidence.events))
    for pod in evidence.pods:
        name = pod["metadata"]["name"]
        archive.add(f"pods/{name}.json", "A pod, as the API server had it.", without_noise(pod))
    for path, text in logs.items():
        archive.add(path, "The end of a container's log.", text.encode(errors="replace"))
    for path, reason in evidence.missing.items():
        archive.note_missing(path, "", reason)
    archive.close(
        f"Bundle of job {metadata['namespace']}/{metadata['name']}",
        f"Kept by the operator when the job failed ({format_timestamp(now)}). Passwords, tokens and keys are replaced "
        "by `***`. If the logs were long, their beginnings are missing.",
    )
    return file.getvalue()


def _summary(job: Manifest, name: str, now: float) -> str:
    metadata = job["metadata"]
    conditions = job.get("status", {}).get("conditions", ())
    failed: Mapping[str, str] = next((one for one in conditions if one["type"] == "Failed"), {})
    why = Redactor().text(f"{failed.get('reason', '')}: {failed.get('message', '')}")
    key = ARCHIVE_KEY.replace(".", "\\.")
    return (
        f"What was kept of job {metadata['namespace']}/{metadata['name']} (uid {metadata['uid']}), which failed at "
        f"{format_timestamp(now)}: {why}\n\n"
        f"kubectl rollouts bundle {metadata['name']} reads it. Without the plugin:\n\n"
        f"  kubectl get configmap {name} -o jsonpath='{{.binaryData.{key}}}' | base64 -d > {ARCHIVE_KEY}\n\n"
        "The next job of this name that fails replaces it. It is not deleted with the job; delete it with\n"
        f"kubectl delete configmap {name}\n"
    )
