"""Reads what a failed job leaves behind, and stores it in a ConfigMap, in bounded time and size."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_api.bundle.archive import BundleArchive
from rollout_api.bundle.kubernetes_objects import (
    ARCHIVE_KEY,
    containers_with_logs,
    log_path,
    shown_events,
    without_noise,
)
from rollout_api.bundle.redaction import Redactor
from rollout_operator import names
from rollout_operator.kubernetes_api import ApiError, KubernetesApi, pod_reference
from rollout_operator.observed import Manifest, format_timestamp

MAX_BYTES = 700 << 10
"""Size of the archive. A ConfigMap may have 1 MiB, and a request to the API server is larger by a third."""
_MAX_LOG_BYTES = 512 << 10
"""Size to which each log is cut at first; it is halved until the archive is small enough."""
_MIN_LOG_BYTES = 512
logger = logging.getLogger(__name__)
_READ_TIMEOUT_S = 15.0
"""Seconds within which logs and Events are read; what has not arrived by then is missing."""
_WRITE_TIMEOUT_S = 15.0
_CONCURRENCY = 8
_LOG_LINES = 1000
_LOG_BYTES = 1 << 20
"""Size to which the API server cuts an answer."""
_KEPT_BYTES = 8 << 20
"""Size to which the logs of a job are cut together, so that the operator needs no more memory for a job of many pods.
Even compressed, more would not fit into a ConfigMap."""
_MIN_KEPT_BYTES = 4 << 10


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


async def keep_bundle(api: KubernetesApi, job: Manifest, name: str, pods: Sequence[str], now: float) -> None:
    """Store the job, its Events and the ends of the logs of its pods in a ConfigMap.

    What cannot be read is named in the bundle.

    Args:
        api: the API server.
        job: the failed job.
        name: name of the ConfigMap.
        pods: names of its pods.
        now: current Unix time.

    Raises:
        ApiError: if the ConfigMap cannot be made or written in time.
    """
    try:
        await _keep_bundle(api, job, name, pods, now)
    except ApiError:
        raise
    except Exception as error:
        # Otherwise, the reconcile would be repeated, and a failed job would keep its pods.
        logger.exception("The bundle of a failed job cannot be made.")
        raise ApiError(0, "BundleFailed", f"{type(error).__name__}: {error}") from error


async def _keep_bundle(api: KubernetesApi, job: Manifest, name: str, pods: Sequence[str], now: float) -> None:
    evidence = Evidence(job)
    reader = _Reader(api, job["metadata"]["namespace"], evidence)
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await reader.read(pods)
    except TimeoutError:
        evidence.missing["logs"] = f"some logs or Events could not be read within {_READ_TIMEOUT_S:.0f} s"
    # In a thread, because compressing takes too long for the event loop of all jobs.
    manifest = await asyncio.to_thread(bundle_config_map, evidence, name, now)
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await api.apply(manifest)
    except TimeoutError:
        raise ApiError(0, "Timeout", f"the bundle could not be stored within {_WRITE_TIMEOUT_S:.0f} s") from None


class _Reader:
    """Reads into an :class:`Evidence`, several objects at the same time."""

    def __init__(self, api: KubernetesApi, namespace: str, evidence: Evidence) -> None:
        self._api, self._namespace, self._evidence = api, namespace, evidence
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def read(self, pods: Sequence[str]) -> None:
        """Read the Events on the job and its pods, and the pods with their logs."""
        job = self._evidence.job["metadata"]["name"]
        await asyncio.gather(*(self._read_events(name) for name in (job, *pods)), *map(self._read_pod, pods))
        logs = [(pod["metadata"]["name"], *log) for pod in self._evidence.pods for log in containers_with_logs(pod)]
        kept = max(_MIN_KEPT_BYTES, _KEPT_BYTES // max(1, len(logs)))
        await asyncio.gather(*(self._read_log(*log, kept) for log in logs))

    async def _read_events(self, name: str) -> None:
        try:
            async with self._slots:
                self._evidence.events += await self._api.events(self._namespace, name)
        except ApiError as error:
            self._evidence.missing[f"Events of {name}"] = str(error)

    async def _read_pod(self, name: str) -> None:
        try:
            async with self._slots:
                pod = await self._api.get(pod_reference(self._namespace, name))
        except ApiError as error:
            self._evidence.missing[f"pods/{name}.json"] = str(error)
            return
        self._evidence.pods.append(pod)

    async def _read_log(self, pod: str, container: str, previous: bool, kept_bytes: int) -> None:
        def read(num_lines: int) -> Awaitable[str]:
            return self._api.log(
                self._namespace, pod, container, previous=previous, num_lines=num_lines, max_bytes=_LOG_BYTES
            )

        try:
            async with self._slots:
                text = await read_end(read, _LOG_LINES, _LOG_BYTES)
        except ApiError as error:
            self._evidence.missing[log_path(pod, container, previous=previous)] = str(error)
            return
        self._evidence.logs.append(ContainerLog(pod, container, previous, last_lines(text, kept_bytes)))


async def read_end(read: Callable[[int], Awaitable[str]], num_lines: int, max_bytes: int) -> str:
    """Return the last lines of a log.

    The API server cuts an answer at its end, where a log says why a container has failed. Therefore, an answer that was
    cut is read again with fewer lines.

    Args:
        read: returns the given number of last lines, cut to *max_bytes*.
        num_lines: maximum number of lines.
        max_bytes: size from which an answer was probably cut.
    """
    while True:
        text = await read(num_lines)
        if len(text.encode(errors="replace")) < max_bytes or num_lines <= 1:
            return text
        num_lines = max(1, num_lines // 4)
