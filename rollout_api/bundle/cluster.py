"""Collects what Kubernetes knows about a job: the RolloutJob, Events, pods and the logs of their containers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from rollout_api.bundle.archive import BundleArchive

ARCHIVE_KEY = "bundle.tar.gz"
"""Key of the archive in the ConfigMap that the operator keeps of a failed job."""
EVENTS, PODS = "events.json", "pods"
"""Paths in a bundle."""

_CONCURRENCY = 8
"""Number of objects that are read at the same time."""
_DROPPED_METADATA = ("managedFields", "selfLink")
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_EVENT_FIELDS = ("type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime")
_Result = TypeVar("_Result")


class ContainerLog(NamedTuple):
    """A log of a container."""

    pod: str
    container: str
    previous: bool
    """Whether it is that of the container that ran before it was restarted."""

    @property
    def path(self) -> str:
        """Path of the log in a bundle."""
        return f"logs/{self.pod}/{self.container}{'-previous' if self.previous else ''}.log"


class ClusterReader(Protocol):
    """Reads what the API server has about one job. Any exception means that something cannot be read."""

    async def events(self) -> Iterable[Mapping[str, Any]]:
        """Return the Events on the job and its pods."""

    async def pods(self) -> Iterable[Mapping[str, Any]]:
        """Return the pods of the job."""

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        """Return the end of a container's log; *num_logs* logs are read together."""


@dataclass
class Evidence:
    """What was read about a job."""

    job: Mapping[str, Any]
    pods: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    logs: dict[str, str | bytes] = field(default_factory=dict)
    """Path in a bundle → the log; bytes are redacted already."""
    missing: dict[str, str] = field(default_factory=dict)
    """Path in a bundle → why it could not be read."""

    async def read(self, cluster: ClusterReader) -> None:
        """Read everything, several objects at the same time."""
        slots = asyncio.Semaphore(_CONCURRENCY)

        async def read(path: str, reading: Callable[[], Awaitable[_Result]]) -> _Result | None:
            try:
                async with slots:
                    return await reading()
            except Exception as error:
                self.missing[path] = str(error) or type(error).__name__
                return None

        events, pods = await asyncio.gather(read(EVENTS, cluster.events), read(PODS, cluster.pods))
        self.events, self.pods = list(events or ()), list(pods or ())
        logs = [log for pod in self.pods for log in _logs(pod)]

        async def read_log(log: ContainerLog) -> None:
            if text := await read(log.path, lambda: cluster.log(log, len(logs))):
                self.logs[log.path] = text

        await asyncio.gather(*map(read_log, logs))

    def add_to(self, archive: BundleArchive) -> None:
        """Add everything to a bundle."""
        archive.add("job.json", "The RolloutJob: its spec and its status.", _without_noise(self.job))
        if EVENTS not in self.missing:
            archive.add(EVENTS, "The Events on the job and its pods.", _shown_events(self.events))
        for pod in self.pods:
            archive.add(f"{PODS}/{pod['metadata']['name']}.json", "A pod.", _without_noise(pod))
        for path, text in self.logs.items():
            archive.add(path, "The end of a container's log.", text)
        for path, reason in self.missing.items():
            archive.note_missing(path, "", reason)


def _without_noise(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the metadata that only concerns its management."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in _DROPPED_METADATA}
    if _APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != _APPLIED}
    return {**manifest, "metadata": metadata}


def _shown_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what matters of Events, in the order of their times."""
    entries = [
        {"object": f"{event['involvedObject'].get('kind')}/{event['involvedObject'].get('name')}"}
        | {name: event[name] for name in _EVENT_FIELDS if event.get(name) is not None}
        for event in events
    ]
    return sorted(entries, key=lambda entry: str(entry.get("lastTimestamp") or entry.get("eventTime") or ""))


def _logs(pod: Mapping[str, Any]) -> list[ContainerLog]:
    """Return the logs of a pod's containers, and those of containers that were restarted."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    found = []
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if container.get("restartCount"):
            found.append(ContainerLog(name, container["name"], True))
        if "waiting" not in container.get("state", {}):
            found.append(ContainerLog(name, container["name"], False))
    return found
