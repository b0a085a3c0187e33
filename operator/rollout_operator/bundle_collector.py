"""Reads what a failed job leaves behind, and stores it in a ConfigMap, in bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rollout_api.bundle.kubernetes_objects import containers_with_logs, log_path
from rollout_operator.bundle_contents import ContainerLog, Evidence, bundle_config_map, last_lines
from rollout_operator.kubernetes_api import ApiError, KubernetesApi, pod_reference
from rollout_operator.observed import Manifest

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
