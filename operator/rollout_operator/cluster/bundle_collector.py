"""Keeps what a failed job leaves behind in a ConfigMap, in bounded time and size."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_api.bundle import ARCHIVE_KEY, BundleArchive, ContainerLog, Evidence
from rollout_api.redaction import Redactor
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi, pod_reference
from rollout_operator.objects import names
from rollout_operator.objects.observed import Manifest, format_timestamp

logger = logging.getLogger(__name__)

MAX_BYTES = 700 << 10
"""Size of the archive. A ConfigMap may have 1 MiB, and a request to the API server is larger by a third."""
_MAX_LOG_BYTES = 512 << 10
"""Size to which each log is cut at first; it is halved until the archive is small enough."""
_MIN_LOG_BYTES = 512
_READ_TIMEOUT_S = 15.0
"""Seconds within which logs and Events are read; what has not arrived by then is missing."""
_WRITE_TIMEOUT_S = 15.0
_LOG_LINES = 1000
_LOG_BYTES = 1 << 20
"""Size to which the API server cuts an answer."""
_KEPT_BYTES = 8 << 20
"""Size to which the logs of a job are cut together, so that the operator needs no more memory for a job of many pods.
Even compressed, more would not fit into a ConfigMap."""
_MIN_KEPT_BYTES = 4 << 10


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
    evidence = Evidence(job)
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await evidence.read(_ApiReader(api, job, pods))
    except TimeoutError:
        evidence.missing["logs"] = f"some logs or Events could not be read within {_READ_TIMEOUT_S:.0f} s"
    try:
        # In a thread, because compressing takes too long for the event loop of all jobs.
        manifest = await asyncio.to_thread(bundle_config_map, evidence, name, now)
    except Exception as error:
        # Otherwise, the reconcile would be repeated, and a failed job would keep its pods.
        logger.exception("The bundle of a failed job cannot be made.")
        raise ApiError(0, "BundleFailed", f"{type(error).__name__}: {error}") from error
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await api.apply(manifest)
    except TimeoutError:
        raise ApiError(0, "Timeout", f"the bundle could not be stored within {_WRITE_TIMEOUT_S:.0f} s") from None


class _ApiReader:
    """Reads about a job from the API server."""

    def __init__(self, api: KubernetesApi, job: Manifest, pods: Sequence[str]) -> None:
        self._api, self._pods = api, pods
        self._namespace, self._job = job["metadata"]["namespace"], job["metadata"]["name"]

    async def events(self) -> list[Manifest]:
        found = await asyncio.gather(*(self._api.events(self._namespace, name) for name in (self._job, *self._pods)))
        return [event for events in found for event in events]

    async def pods(self) -> list[Manifest]:
        found: list[Manifest] = []
        for name in self._pods:
            try:
                found.append(await self._api.get(pod_reference(self._namespace, name)))
            except ApiError as error:
                if not error.not_found:
                    raise
        return found

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        def read(num_lines: int) -> Awaitable[str]:
            return self._api.log(
                self._namespace,
                log.pod,
                log.container,
                previous=log.previous,
                num_lines=num_lines,
                max_bytes=_LOG_BYTES,
            )

        text = await read_end(read, _LOG_LINES, _LOG_BYTES)
        return last_lines(text, max(_MIN_KEPT_BYTES, _KEPT_BYTES // num_logs))


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


def last_lines(text: str, max_bytes: int) -> str:
    """Return the last lines of *text* that have at most *max_bytes* bytes, or the end of its last line."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    end = data[len(data) - max_bytes :]
    is_line = data[len(data) - max_bytes - 1 : len(data) - max_bytes] == b"\n"
    rest = end if is_line else end.partition(b"\n")[2]
    return (rest or end).decode(errors="ignore")


def bundle_config_map(evidence: Evidence, name: str, now: float) -> dict[str, Any]:
    """Return the ConfigMap with what is kept of a failed job. It has no owner, so that it outlives the job.

    Args:
        evidence: what was read.
        name: name of the ConfigMap.
        now: current Unix time.
    """
    metadata = evidence.job["metadata"]
    labels = names.labels_outside_release("bundle") | {names.BUNDLE_LABEL: metadata["name"]}
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
    logs = {path: redactor.text(text) for path, text in evidence.logs.items() if isinstance(text, str)}
    limit = _MAX_LOG_BYTES
    while True:
        shortened: dict[str, str | bytes] = {
            path: last_lines(text, limit).encode(errors="replace") for path, text in logs.items()
        }
        archive = _archive(replace(evidence, logs=shortened), redactor, now)
        if len(archive) <= max_bytes or limit <= _MIN_LOG_BYTES:
            return archive
        limit //= 2


def _archive(evidence: Evidence, redactor: Redactor, now: float) -> bytes:
    metadata = evidence.job["metadata"]
    file = io.BytesIO()
    archive = BundleArchive(file, folder=f"bundle-{metadata['namespace']}-{metadata['name']}", redactor=redactor)
    evidence.add_to(archive)
    archive.close(
        f"Bundle of job {metadata['namespace']}/{metadata['name']}",
        f"Kept by the operator when the job failed ({format_timestamp(now)}). Passwords, tokens and keys are replaced "
        "by `***`. If the logs were long, their beginnings are missing.",
    )
    return file.getvalue()


def _summary(job: Mapping[str, Any], name: str, now: float) -> str:
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
