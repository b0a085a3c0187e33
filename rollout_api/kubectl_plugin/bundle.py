"""``kubectl rollouts bundle``: all that the cluster and the head know about a job, in one archive."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rollout_api.bundle.archive import BundleArchive
from rollout_api.bundle.kubernetes_objects import (
    ARCHIVE_KEY,
    containers_with_logs,
    log_path,
    shown_events,
    without_noise,
)
from rollout_api.bundle.redaction import Redactor
from rollout_api.kubectl_plugin.head_commands import exec_arguments
from rollout_api.kubectl_plugin.jobs import get_job, summary
from rollout_api.kubectl_plugin.kubectl import RESOURCE, Kubectl, NotFoundError, PluginError
from rollout_api.kubectl_plugin.pods import list_pods, running_head, selector
from rollout_api.manifest.rollout_job import GROUP

JOB_UID_ANNOTATION = f"{GROUP}/job-uid"
"""Annotation of a kept bundle with the uid of its job, as the operator's ``names`` module defines it."""
_COMPONENTS = ("head", "worker", "prefetch", "cleanup", "server")
_LOG_LINES = 20_000
"""Number of last lines of each log."""
_COLUMNS = 100
_KEPT = "What the operator has kept when the job failed; see this page of it."
_OF_HEAD = "What `rollout bundle` has collected in the head; see this page of it."


def bundle_config_map(job: str) -> str:
    """Return the name of the ConfigMap in which the operator keeps the bundle of a failed job."""
    return f"{job}-bundle"


def save_bundle(kubectl: Kubectl, name: str, target: Path, *, with_rollouts: bool, say: Callable[[str], None]) -> None:
    """Collect the bundle of a job.

    Args:
        kubectl: access to the cluster.
        name: name of the job, which may have been deleted if it had failed.
        target: the file to write.
        with_rollouts: whether prompts and responses are included.
        say: shows a line to the user.

    Raises:
        PluginError: if there is neither such a job nor a bundle of it, if kubectl fails, or if the file cannot be
            written.
    """
    try:
        job: dict[str, Any] | None = kubectl.get(RESOURCE, name)
    except NotFoundError:
        job = None
    kept = _read_kept(kubectl, name, job)
    if job is None and isinstance(kept, str):
        get_job(kubectl, name)  # says which jobs there are
    file = io.BytesIO()
    archive = BundleArchive(file, folder=f"bundle-{name}", redactor=Redactor())
    if job is not None:
        say(summary(job))
        _collect(kubectl, archive, job, with_rollouts=with_rollouts)
    else:
        archive.note_missing("job.json", "The RolloutJob.", "the job was deleted; this is what the operator has kept")
    if isinstance(kept, bytes):
        archive.add_archive("kept", _KEPT, kept)
    else:
        archive.note_missing("kept/README.md", _KEPT, kept)
    archive.close(
        f"Bundle of job {name}",
        f"Collected by `kubectl rollouts bundle` at {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC. Passwords, "
        "tokens and keys are replaced by `***`. Containers log what programs of yours print.",
    )
    try:
        target.write_bytes(file.getvalue())
    except OSError as error:
        raise PluginError(f"cannot write {target}: {error.strerror}") from None


def kept_archive(config_map: Mapping[str, Any], uid: str | None) -> bytes | str:
    """Return the archive in a ConfigMap that the operator has kept, or why there is none.

    Args:
        config_map: the ConfigMap.
        uid: uid of the job; None if any job of the name is meant.
    """
    metadata = config_map["metadata"]
    content = config_map.get("binaryData", {}).get(ARCHIVE_KEY)
    if content is None:
        return f"ConfigMap {metadata['name']} is no bundle of a job"
    of = metadata.get("annotations", {}).get(JOB_UID_ANNOTATION)
    if uid is not None and of != uid:
        return f"ConfigMap {metadata['name']} is the bundle of an earlier job of this name (uid {of})"
    return base64.b64decode(content)


def _read_kept(kubectl: Kubectl, name: str, job: Mapping[str, Any] | None) -> bytes | str:
    try:
        config_map = kubectl.get("configmap", bundle_config_map(name))
    except NotFoundError:
        return "the operator keeps a bundle only of jobs that have failed"
    except PluginError as error:
        return str(error)
    return kept_archive(config_map, None if job is None else job["metadata"]["uid"])


def _collect(kubectl: Kubectl, archive: BundleArchive, job: dict[str, Any], *, with_rollouts: bool) -> None:
    name = job["metadata"]["name"]
    archive.add("job.json", "The RolloutJob: its spec and its status.", without_noise(job))
    archive.collect("events.json", "The Events on the job and its objects.", lambda: _read_events(kubectl, name))
    archive.collect("versions.json", "The versions of kubectl and the cluster.", lambda: _read_versions(kubectl))
    try:
        pods = list_pods(kubectl, selector(name))
    except PluginError as error:
        archive.note_missing("pods", "The pods and their logs.", str(error))
        return
    if not pods:
        archive.note_missing("pods", "The pods and their logs.", "the job has no pods")
    for pod in pods:
        _collect_pod(kubectl, archive, pod)
    try:
        head = running_head(kubectl, job)
        options = ["--with-rollouts"] if with_rollouts else []
        command = exec_arguments(head, job, ("bundle", "--output=-", *options), columns=_COLUMNS, tty=False)
        archive.add_archive("head", _OF_HEAD, kubectl.read(*command))
    except Exception as error:
        archive.note_missing("head/README.md", _OF_HEAD, str(error))


def _collect_pod(kubectl: Kubectl, archive: BundleArchive, pod: Mapping[str, Any]) -> None:
    name = pod["metadata"]["name"]
    archive.collect(
        f"pods/{name}.txt", "A pod, as kubectl describes it.", lambda: kubectl.output("describe", "pod", name)
    )
    for container, previous in containers_with_logs(pod):
        options = [f"--container={container}", "--timestamps", f"--tail={_LOG_LINES}"]
        arguments = ["logs", name, *options, *(["--previous"] if previous else [])]
        archive.collect(
            log_path(name, container, previous=previous),
            "The log of a container, before it was restarted." if previous else "The log of a container.",
            partial(kubectl.output, *arguments),
        )


def _read_events(kubectl: Kubectl, job: str) -> list[dict[str, Any]]:
    events = kubectl.get("events")["items"]
    return shown_events(event for event in events if belongs_to(event["involvedObject"].get("name", ""), job))


def belongs_to(name: str, job: str) -> bool:
    """Return whether an object, which may no longer exist, is a job or one of its pods, by its name."""
    return re.fullmatch(rf"{re.escape(job)}(-({'|'.join(_COMPONENTS)})(-[a-z0-9-]+)?)?", name) is not None


def _read_versions(kubectl: Kubectl) -> Any:
    return json.loads(kubectl.output("version", "-o", "json"))
