"""``kubectl rollouts bundle``: all that the cluster and the head know about a job, in one archive."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rollout_api.bundle.archive import BundleArchive
from rollout_api.bundle.cluster import ARCHIVE_KEY, PODS, ContainerLog, Evidence
from rollout_api.bundle.redaction import Redactor
from rollout_api.kubectl_plugin.commands import exec_arguments
from rollout_api.kubectl_plugin.kubectl import (
    RESOURCE,
    Kubectl,
    NotFoundError,
    PluginError,
    get_job,
    list_pods,
    running_head,
    selector,
    summary,
)
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
    """Return the name of the ConfigMap that holds the operator's bundle of a failed job."""
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
    evidence = Evidence(job)
    asyncio.run(evidence.read(_KubectlReader(kubectl, job["metadata"]["name"])))
    evidence.add_to(archive)
    if not evidence.pods and PODS not in evidence.missing:
        archive.note_missing(PODS, "The pods and their logs.", "the job has no pods")
    archive.collect(
        "versions.json",
        "The versions of kubectl and the cluster.",
        lambda: json.loads(kubectl.output("version", "-o", "json")),
    )
    try:
        head = running_head(kubectl, job)
        options = ["--with-rollouts"] if with_rollouts else []
        command = exec_arguments(head, job, ("bundle", "--output=-", *options), columns=_COLUMNS, tty=False)
        archive.add_archive("head", _OF_HEAD, kubectl.read(*command))
    except Exception as error:
        archive.note_missing("head/README.md", _OF_HEAD, str(error))


class _KubectlReader:
    """Reads about a job with kubectl."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._kubectl, self._job = kubectl, job

    async def events(self) -> list[dict[str, Any]]:
        events = (await asyncio.to_thread(self._kubectl.get, "events"))["items"]
        return [event for event in events if belongs_to(event["involvedObject"].get("name", ""), self._job)]

    async def pods(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(list_pods, self._kubectl, selector(self._job))

    async def log(self, log: ContainerLog, _: int) -> str:
        options = [f"--container={log.container}", "--timestamps", f"--tail={_LOG_LINES}"]
        previous = ["--previous"] if log.previous else []
        return await asyncio.to_thread(self._kubectl.output, "logs", log.pod, *options, *previous)


def belongs_to(name: str, job: str) -> bool:
    """Return whether an object, which may no longer exist, is a job or one of its pods, by its name."""
    return re.fullmatch(rf"{re.escape(job)}(-({'|'.join(_COMPONENTS)})(-[a-z0-9-]+)?)?", name) is not None
